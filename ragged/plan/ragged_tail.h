// Who owns the blocks of a ragged segment. Internal to the planner.
#pragma once

#include <span>
#include <vector>

#include "ragged/plan/bucket_plan.h"

namespace ragged::plan::detail {

/// Pieces of a tensor that may have different owners: its blocks, short ones included.
Index num_blocks(const ParamSpec& param);

/// Where a tensor lies in a ragged segment.
struct TailTensor {
  const ParamSpec* param = nullptr;  // has elements
  Index start = 0;                   // in the image
};

/// One interval a rank. Where blocks are no more than ranks, each tensor takes consecutive ranks
/// that own nothing else here, one a block: those that `loads` (elements a rank already owns in
/// other tails; empty: none) shows the least of, ties going to the next from `first_owner` on. It
/// never wraps, so that a tensor's owners ascend. More blocks than ranks: every rank gets its share
/// of neighbouring blocks.
std::vector<Interval> tail_owners(
    std::span<const TailTensor> tensors, int world_size, int first_owner, std::span<const Index> loads);

}  // namespace ragged::plan::detail
