// The one type that optimizers, checkpoints and Python share: this rank's piece of a tensor, with what is needed
// to know which piece. A value over shared storage; no DTensor, no communication.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ragged/layout/mesh.h"
#include "ragged/layout/placement.h"

namespace ragged::buffer {

struct ShardedTensor {
  std::string name;          // fully qualified
  std::vector<Index> shape;  // global
  at::ScalarType dtype = at::kFloat;
  layout::Mesh mesh = layout::Mesh::shard(1);
  std::vector<layout::Placement> placements;  // one a mesh dim
  at::Tensor local;                           // 1-D, possibly empty: the row-major elements of `owned`
  layout::Interval owned;                     // flat interval of the tensor that this rank holds
  int unit = 0;                               // index of its unit in the tree, and of the tensor in the unit
  int index = 0;
  bool requires_grad = true;
};

}  // namespace ragged::buffer
