// Compiled with -ffp-contract=off (CMakeLists.txt): a fused multiply-add would change the bits.
#include "ragged/comm/sum_in_rank_order.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include "ragged/base/error.h"

namespace ragged::comm {
namespace {

constexpr Index kGrain = 1 << 15;  // elements a thread at least
constexpr Index kTile = 1024;      // elements summed at once: the accumulators stay in the first-level cache

// Half-precision types are made from float alone, so a double goes through it.
template <class Out, class Acc>
Out narrowed(Acc value) {
  if constexpr (std::is_same_v<Out, double>) return static_cast<double>(value);
  return static_cast<Out>(static_cast<float>(value));
}

template <class In, class Out, class Acc>
void sum_range(
    const In* addends, int num_ranks, Index numel, Out* out, Index begin, Index end, const SumInRankOrder& options) {
  const Acc scale = static_cast<Acc>(options.scale);
  Acc sums[kTile];
  for (Index tile = begin; tile < end; tile += kTile) {
    const Index length = std::min(kTile, end - tile);
    const In* first = addends + tile;
    for (Index i = 0; i < length; ++i) sums[i] = static_cast<Acc>(first[i]);
    for (int rank = 1; rank < num_ranks; ++rank) {
      const In* next = addends + static_cast<Index>(rank) * numel + tile;
      for (Index i = 0; i < length; ++i) sums[i] = sums[i] + static_cast<Acc>(next[i]);
    }
    Out* target = out + tile;
    if (options.accumulate) {
      for (Index i = 0; i < length; ++i) {
        target[i] = narrowed<Out>(static_cast<Acc>(target[i]) + sums[i] * scale);
      }
    } else {
      for (Index i = 0; i < length; ++i) target[i] = narrowed<Out>(sums[i] * scale);
    }
  }
}

// Where there is no kernel of ours (CUDA): the same order through ATen, one pass an addend.
void sum_through_aten(const at::Tensor& addends, int num_ranks, const at::Tensor& out, const SumInRankOrder& options) {
  const auto type = addends.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor sum = addends.narrow(0, 0, out.numel()).to(type, /*non_blocking=*/false, /*copy=*/true);
  for (int rank = 1; rank < num_ranks; ++rank) {
    sum.add_(addends.narrow(0, rank * out.numel(), out.numel()));
  }
  sum.mul_(options.scale);
  if (options.accumulate) {
    out.add_(sum);
  } else {
    out.copy_(sum);
  }
}

}  // namespace

void sum_in_rank_order(const at::Tensor& addends, int num_ranks, const at::Tensor& out, const SumInRankOrder& options) {
  const Index numel = out.numel();
  RAGGED_ASSERT(
      addends.numel() == numel * num_ranks, "{} addends for {} ranks of {}", addends.numel(), num_ranks, numel);
  if (numel == 0) return;
  if (!out.device().is_cpu()) return sum_through_aten(addends, num_ranks, out, options);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, addends.scalar_type(), "ragged_sum_addends", [&] {
    using In = scalar_t;
    const In* in = addends.const_data_ptr<In>();
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, out.scalar_type(), "ragged_sum_out", [&] {
      using Out = scalar_t;
      using Acc = std::conditional_t<std::is_same_v<In, double>, double, float>;
      Out* target = out.mutable_data_ptr<Out>();
      at::parallel_for(0, numel, kGrain, [&](Index begin, Index end) {
        sum_range<In, Out, Acc>(in, num_ranks, numel, target, begin, end, options);
      });
    });
  });
}

}  // namespace ragged::comm
