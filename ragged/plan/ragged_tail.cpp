#include "ragged/plan/ragged_tail.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <utility>

namespace ragged::plan::detail {
namespace {

std::size_t at(Index i) {
  return static_cast<std::size_t>(i);
}

// The i-th block of a parameter, in its elements.
Interval block(const ParamSpec& param, Index i) {
  const Index numel = param.numel();
  const Index run = param.restart > 0 ? param.restart : numel;
  const Index blocks_a_run = ceil_div(run, param.block);
  const Index begin = i / blocks_a_run * run;
  const Index in_run = i % blocks_a_run * param.block;
  return {begin + in_run, std::min({begin + in_run + param.block, begin + run, numel})};
}

// The first of `count` consecutive free ranks whose most loaded one has the least, from `first`
// on; -1 where no such ranks are free. A window slides over the ranks, its candidates for the
// largest load in descending order.
Index lightest_window(const std::vector<bool>& is_free, std::span<const Index> loads, Index count, Index first_owner) {
  const auto world_size = static_cast<Index>(is_free.size());
  const auto load = [&](Index rank) { return loads.empty() ? 0 : loads[at(rank)]; };
  std::deque<Index> candidates;
  Index best = -1;
  Index best_load = 0;
  Index best_distance = 0;
  Index num_free = 0;  // consecutive, up to here
  for (Index rank = 0; rank < world_size; ++rank) {
    num_free = is_free[at(rank)] ? num_free + 1 : 0;
    while (!candidates.empty() && load(candidates.back()) <= load(rank)) candidates.pop_back();
    candidates.push_back(rank);
    const Index begin = rank + 1 - count;
    if (candidates.front() < begin) candidates.pop_front();
    if (num_free < count) continue;
    const Index largest = load(candidates.front());
    const Index distance = (begin - first_owner + world_size) % world_size;
    if (best >= 0 && std::pair(largest, distance) >= std::pair(best_load, best_distance)) continue;
    best = begin;
    best_load = largest;
    best_distance = distance;
  }
  return best;
}

// All tensors side by side, from rank 0 or up to the last, in the order that leaves the most loaded
// rank the least.
std::vector<Index> side_by_side(
    std::span<const TailTensor> tensors, const std::vector<Index>& blocks, Index world_size,
    std::span<const Index> loads) {
  constexpr int kMaxOrders = 120;
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const Index total = std::accumulate(blocks.begin(), blocks.end(), Index{0});
  std::vector<Index> best;
  Index best_load = 0;
  int num_orders = 0;
  do {
    for (const Index offset : {Index{0}, world_size - total}) {
      std::vector<Index> first(tensors.size());
      Index rank = offset;
      Index largest = 0;
      for (std::size_t t : order) {
        first[t] = rank;
        for (Index i = 0; i < blocks[t]; ++i, ++rank) {
          largest = std::max(largest, (loads.empty() ? 0 : loads[at(rank)]) + tensors[t].param->block);
        }
      }
      if (!best.empty() && largest >= best_load) continue;
      best = std::move(first);
      best_load = largest;
    }
  } while (++num_orders < kMaxOrders && std::next_permutation(order.begin(), order.end()));
  return best;
}

// The first rank of every tensor, one rank a block. There are no more blocks than ranks.
std::vector<Index> first_ranks(
    std::span<const TailTensor> tensors, const std::vector<Index>& blocks, Index world_size, Index first_owner,
    std::span<const Index> loads) {
  // Those with large blocks choose first.
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return tensors[a].param->block > tensors[b].param->block;
  });
  std::vector<Index> result(tensors.size());
  std::vector<bool> is_free(at(world_size), true);
  for (std::size_t t : order) {
    const Index first = lightest_window(is_free, loads, blocks[t], first_owner);
    // What is free lies too scattered.
    if (first < 0) return side_by_side(tensors, blocks, world_size, loads);
    result[t] = first;
    std::fill_n(is_free.begin() + first, blocks[t], false);
  }
  return result;
}

}  // namespace

Index num_blocks(const ParamSpec& param) {
  const Index numel = param.numel();
  if (numel == 0) return 0;
  const Index run = param.restart > 0 ? std::min(param.restart, numel) : numel;
  return numel / run * ceil_div(run, param.block) + ceil_div(numel % run, param.block);
}

std::vector<Interval> tail_owners(
    std::span<const TailTensor> tensors, int world_size, int first_owner, std::span<const Index> loads) {
  std::vector<Interval> owners(at(world_size));
  std::vector<Index> blocks;
  Index total = 0;
  Index numel = 0;
  for (const TailTensor& tensor : tensors) {
    blocks.push_back(num_blocks(*tensor.param));
    total += blocks.back();
    numel += tensor.param->numel();
  }
  const bool is_one_each = total <= world_size;
  const std::vector<Index> first =
      is_one_each ? first_ranks(tensors, blocks, world_size, first_owner, loads) : std::vector<Index>(blocks.size());
  Index passed = 0;  // elements of the blocks before
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const TailTensor& tensor = tensors[t];
    for (Index i = 0; i < blocks[t]; ++i) {
      const Interval part = block(*tensor.param, i);
      // The rank in whose even share the block's middle lies.
      const Index middle = passed + part.size() / 2;
      const auto share = static_cast<Index>(static_cast<double>(middle) / static_cast<double>(numel) * world_size);
      const Index rank = is_one_each ? first[t] + i : std::clamp<Index>(share, 0, world_size - 1);
      Interval& own = owners[at(rank)];
      if (own.empty()) own.begin = tensor.start + part.begin;
      own.end = tensor.start + part.end;
      passed += part.size();
    }
  }
  // Those without an interval: an empty one where the segment begins.
  for (Interval& own : owners) {
    if (own.empty() && !tensors.empty()) own = {tensors[0].start, tensors[0].start};
  }
  return owners;
}

}  // namespace ragged::plan::detail
