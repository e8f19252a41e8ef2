// Compiled with -ffp-contract=off (CMakeLists.txt): a fused multiply-add would change the bits.
#include "ragged/comm/sum_in_rank_order.h"

#include <vector>

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
void sum_range(std::span<const In* const> addends, Out* out, Index begin, Index end, const SumInRankOrder& options) {
  const Acc scale = static_cast<Acc>(options.scale);
  Acc sums[kTile];
  for (Index tile = begin; tile < end; tile += kTile) {
    const Index length = std::min(kTile, end - tile);
    const In* first = addends.front() + tile;
    for (Index i = 0; i < length; ++i) sums[i] = static_cast<Acc>(first[i]);
    for (const In* addend : addends.subspan(1)) {
      const In* next = addend + tile;
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
void sum_through_aten(std::span<const at::Tensor> addends, const at::Tensor& out, const SumInRankOrder& options) {
  const auto type = addends.front().scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor sum = addends.front().to(type, /*non_blocking=*/false, /*copy=*/true);
  for (const at::Tensor& addend : addends.subspan(1)) sum.add_(addend);
  sum.mul_(options.scale);
  if (options.accumulate) {
    out.add_(sum);
  } else {
    out.copy_(sum);
  }
}

}  // namespace

void sum_in_rank_order(std::span<const at::Tensor> addends, const at::Tensor& out, const SumInRankOrder& options) {
  const Index numel = out.numel();
  RAGGED_ASSERT(!addends.empty(), "a sum of no addends");
  const auto type = addends.front().scalar_type();
  for (const at::Tensor& addend : addends) {
    RAGGED_ASSERT(
        addend.numel() == numel && addend.scalar_type() == type, "an addend of {} elements of {} to a sum of {} of {}",
        addend.numel(), c10::toString(addend.scalar_type()), numel, c10::toString(type));
  }
  if (numel == 0) return;
  if (!out.device().is_cpu()) return sum_through_aten(addends, out, options);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, type, "ragged_sum_addends", [&] {
    using In = scalar_t;
    std::vector<const In*> in;
    for (const at::Tensor& addend : addends) in.push_back(addend.const_data_ptr<In>());
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, out.scalar_type(), "ragged_sum_out", [&] {
      using Out = scalar_t;
      using Acc = std::conditional_t<std::is_same_v<In, double>, double, float>;
      Out* target = out.mutable_data_ptr<Out>();
      at::parallel_for(
          0, numel, kGrain, [&](Index begin, Index end) { sum_range<In, Out, Acc>(in, target, begin, end, options); });
    });
  });
}

void sum_in_rank_order(const at::Tensor& addends, int num_ranks, const at::Tensor& out, const SumInRankOrder& options) {
  const Index numel = out.numel();
  RAGGED_ASSERT(
      addends.numel() == numel * num_ranks, "{} addends for {} ranks of {}", addends.numel(), num_ranks, numel);
  std::vector<at::Tensor> each;
  for (int rank = 0; rank < num_ranks; ++rank) each.push_back(addends.narrow(0, rank * numel, numel));
  sum_in_rank_order(each, out, options);
}

}  // namespace ragged::comm
