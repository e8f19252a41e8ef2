// The arithmetic half of a reduction by all-to-all.
#pragma once

#include <span>

#include <ATen/core/Tensor.h>

#include "ragged/base/math.h"

namespace ragged::comm {

struct SumInRankOrder {
  double scale = 1.0;
  bool accumulate = false;
};

/// addends: 1-D, one a rank, of out.numel() elements of one dtype. out: 1-D, of any floating dtype; where it overwrites
/// (options.accumulate false), it may be one of the addends.
/// out = ((a0 + a1) + a2 + ...) * scale, or out + that. Sums in fp32 (fp64 for fp64 addends), without contraction:
/// the bits depend on the inputs alone.
void sum_in_rank_order(std::span<const at::Tensor> addends, const at::Tensor& out, const SumInRankOrder& options);
/// The same where the addends are `num_ranks` runs of one 1-D tensor, rank 0's first.
void sum_in_rank_order(const at::Tensor& addends, int num_ranks, const at::Tensor& out, const SumInRankOrder& options);

}  // namespace ragged::comm
