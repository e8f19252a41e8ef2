// Sharded trees for optimizer tests, and gradients that don't depend on the layout.
#pragma once

#include <map>
#include <memory>

#include "ragged/fsdp/unit.h"
#include "tests/support/ranks.h"
#include "tests/support/tiny_model.h"

namespace ragged::test {

struct Tree {
  std::shared_ptr<TinyModel> model;
  std::shared_ptr<fsdp::Unit> root;
};

/// The tiny model, a unit a layer. `whole_tensors`: a parameter stays on one rank, so that some ranks own nothing of
/// most units.
Tree make_tree(comm::World& world, const MeshShape& mesh, bool whole_tensors = false);

/// One forward and backward on this rank's batch.
void backward(Tree& tree, int rank, int step = 0);

/// The whole gradient of a parameter at a step, as a function of its name.
std::vector<float> made_up_gradient(const std::string& name, Index numel, int step);
/// Overwrites all gradients of the tree with pieces of those.
void make_up_gradients(fsdp::Unit& root, int step);

Index numel_of(const buffer::ShardedTensor& tensor);
std::vector<float> values_of(const at::Tensor& tensor);
/// The piece of a whole parameter that a rank owns.
std::vector<float> cut(const std::vector<float>& whole, layout::Interval owned);

}  // namespace ragged::test
