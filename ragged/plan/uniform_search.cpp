#include "ragged/plan/uniform_search.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

namespace ragged::plan {
namespace detail {
namespace {

constexpr Index kNowhere = -1;

// How one tensor may lie on the grid of shard borders. `may_span` allows it to contain whole
// shards.
struct Grid {
  Index shard_size;
  Index start_alignment;
};

// Earliest start at or after `cursor` at which no border cuts a block; kNowhere when there is none.
//
// Only three starts can be the earliest: the cursor itself if no border is inside the tensor; the
// one that lays as many whole blocks as fit before the next border; that border, from where the
// question repeats once. Two or more borders inside need the block to divide the shard size.
Index earliest_start(Index cursor, const Extent& tensor, const Grid& grid, bool may_span) {
  cursor = round_up(cursor, grid.start_alignment);
  // Starts are aligned and so are borders: only these many blocks, or a multiple, lie between the
  // two.
  const Index block_step = grid.start_alignment / std::gcd(grid.start_alignment, tensor.block);
  for (int round = 0; round < 2; ++round) {
    const Index border = (cursor / grid.shard_size + 1) * grid.shard_size;
    if (tensor.numel <= border - cursor) return cursor;
    const Index blocks = (border - cursor) / tensor.block / block_step * block_step;
    if (blocks >= 1) {
      const Index start = border - blocks * tensor.block;
      const bool has_one_border = tensor.numel <= border + grid.shard_size - start;
      if (has_one_border) return start;
      if (may_span && grid.shard_size % tensor.block == 0) return start;
    }
    cursor = border;
  }
  return kNowhere;
}

// Far beyond what distinct blocks of a real bucket give (tens); keeps odd policies from running
// away.
constexpr std::size_t kMaxUnits = 1 << 14;

// The least common multiples of `base` with every subset of `blocks`, as far as they have a
// multiple from `smallest` up to below `best`. One without has none among its multiples either, so
// the sets stay small.
std::vector<Index> lcms_of_subsets(Index base, const std::vector<Index>& blocks, Index smallest, Index best) {
  std::vector<Index> units{base};
  for (Index block : blocks) {
    const std::size_t count = units.size();
    for (std::size_t i = 0; i < count; ++i) {
      const Index next = capped_lcm(units[i], block, best);
      if (next < best && (best - 1) / next * next >= smallest) units.push_back(next);
    }
    std::sort(units.begin(), units.end());
    units.erase(std::unique(units.begin(), units.end()), units.end());
    if (units.size() > kMaxUnits) break;
  }
  return units;
}

}  // namespace

UniformSearch::UniformSearch(
    std::span<const Extent> tensors, int world_size, Index collective_unit, Index start_alignment)
    : tensors_(tensors), world_size_(world_size), start_alignment_(start_alignment) {
  RAGGED_CHECK(world_size >= 1, "[plan] Expected a world size of at least 1, but got {}.", world_size);
  RAGGED_CHECK(collective_unit >= 1, "[plan] Expected a collective unit of at least 1, but got {}.", collective_unit);
  RAGGED_CHECK(
      start_alignment >= 1 && collective_unit % start_alignment == 0,
      "[plan] Expected a start alignment that divides the collective unit {}, but got {}.", collective_unit,
      start_alignment);
  // Room for world_size * 2 * largest_, the largest number that the search forms.
  const Index limit = std::numeric_limits<Index>::max() / 4 / world_size;
  RAGGED_CHECK(
      collective_unit <= limit, "[plan] Expected a collective unit of at most {}, but got {}.", limit, collective_unit);
  Index numel = 0;
  Index packed = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Extent& tensor = tensors[i];
    RAGGED_CHECK(tensor.numel >= 0, "[plan] Expected sizes >= 0, but got {} (tensor {}).", tensor.numel, i);
    RAGGED_CHECK(
        tensor.block >= 1 && (tensor.numel == 0 || tensor.block <= tensor.numel),
        "[plan] Expected a block of 1 to {} elements, but got {} (tensor {}).", std::max<Index>(tensor.numel, 1),
        tensor.block, i);
    RAGGED_CHECK(
        tensor.numel <= limit - start_alignment - collective_unit - packed,
        "[plan] Expected fewer than {} elements for {} ranks, but got more (tensor {}). Make the "
        "bucket smaller.",
        limit, world_size, i);
    numel += tensor.numel;
    packed += round_up(tensor.numel, start_alignment);
  }
  smallest_ = round_up(ceil_div(numel, world_size), collective_unit);
  largest_ = round_up(packed, collective_unit);
}

bool UniformSearch::walk(Index shard_size, Index unit, std::vector<Index>* starts) const {
  const Index end = shard_size * world_size_;
  const Grid grid{shard_size, start_alignment_};
  Index cursor = 0;
  for (const Extent& tensor : tensors_) {
    if (tensor.numel == 0) {
      if (starts != nullptr) starts->push_back(round_up(cursor, start_alignment_));
      continue;
    }
    const Index start = earliest_start(cursor, tensor, grid, unit % tensor.block == 0);
    if (start == kNowhere || tensor.numel > end - start) return false;
    if (starts != nullptr) starts->push_back(start);
    cursor = start + tensor.numel;
  }
  return true;
}

std::optional<std::vector<Index>> UniformSearch::place(Index shard_size, Index unit) const {
  std::vector<Index> starts;
  starts.reserve(tensors_.size());
  if (!walk(shard_size, unit, &starts)) return std::nullopt;
  return starts;
}

bool UniformSearch::fits(Index shard_size, Index unit) const {
  return walk(shard_size, unit, nullptr);
}

Index UniformSearch::improve(Index best, Index unit) const {
  // Over multiples of the unit fits() only ever turns from false to true, since all that may
  // contain whole shards keeps its blocks on the borders. So one question tells whether there is
  // anything to find.
  Index low = std::max<Index>(ceil_div(smallest_, unit), 1);
  Index high = (best - 1) / unit;
  if (high < low || !fits(high * unit, unit)) return best;
  while (low < high) {
    const Index middle = low + (high - low) / 2;
    if (fits(middle * unit, unit)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return high * unit;
}

// A tensor that contains a whole shard has two borders inside, so its block divides S: the best S is
// a multiple of the LCM of some set of blocks, and improve() finds the least multiple for a given
// set.
Index shard_size_below(
    const UniformSearch& search, std::span<const Extent> tensors, Index collective_unit, Index cutoff) {
  Index best = cutoff;
  Index base = collective_unit;
  std::vector<Index> optional;
  for (const Extent& tensor : tensors) {
    if (tensor.numel > 2 * best) {
      // Contains a whole shard wherever it lies, at any better S.
      base = capped_lcm(base, tensor.block, best);
      if (base >= best) return best;
    } else if (tensor.numel > search.smallest()) {
      optional.push_back(tensor.block);  // the others are too short to contain one
    }
  }
  std::sort(optional.begin(), optional.end());
  optional.erase(std::unique(optional.begin(), optional.end()), optional.end());
  for (Index unit : lcms_of_subsets(base, optional, search.smallest(), best)) {
    if (best == search.smallest()) break;
    best = search.improve(best, unit);
  }
  return best;
}

void add_pieces(PieceCounts& pieces, Index numel, Index block, Index restart) {
  const auto add_run = [&](Index length, Index num_runs) {
    if (length >= block) pieces[block] += length / block * num_runs;
    if (length % block != 0) pieces[length % block] += num_runs;
  };
  if (numel == 0) return;
  const Index run = restart > 0 ? std::min(restart, numel) : numel;
  add_run(run, numel / run);
  if (numel % run != 0) add_run(numel % run, 1);
}

Index bound_for_pieces(const PieceCounts& pieces, int world_size, Index collective_unit) {
  Index numel = 0;
  for (const auto& [piece, count] : pieces) numel += piece * count;
  if (numel == 0) return 0;
  // With u = size / parts as the unit, a piece holds floor(piece / u) whole units, a rank of load S
  // at most floor(S / u), so S >= u * ceil(all units / ranks). Any u is right; fractions of the
  // pieces are where the bound jumps. Buckets of many distinct pieces try fewer fractions, to stay
  // in microseconds.
  const Index most_parts = std::min(
      std::clamp<Index>(4096 / static_cast<Index>(pieces.size()), 1, 64),
      std::numeric_limits<Index>::max() / 4 / numel);
  Index bound = ceil_div(numel, world_size);
  for (const auto& [size, unused] : pieces) {
    for (Index parts = 1; parts <= most_parts; ++parts) {
      Index units = 0;
      for (const auto& [piece, count] : pieces) units += piece * parts / size * count;
      bound = std::max(bound, ceil_div(size * ceil_div(units, world_size), parts));
    }
  }
  return round_up(bound, collective_unit);
}

}  // namespace detail

namespace {

using detail::UniformSearch;

Index lcm_of_prefixes(const UniformSearch& search, std::span<const Extent> tensors, Index collective_unit) {
  std::vector<Extent> by_size(tensors.begin(), tensors.end());
  std::stable_sort(by_size.begin(), by_size.end(), [](const Extent& a, const Extent& b) { return a.numel > b.numel; });
  Index best = search.improve(search.largest() + 1, collective_unit);
  Index unit = collective_unit;
  for (const Extent& tensor : by_size) {
    const Index next = capped_lcm(unit, tensor.block, best);
    if (next >= best) break;  // every further unit is a multiple of this one
    if (next != unit) best = search.improve(best, next);
    unit = next;
  }
  return best;
}

// Exact for the order.
Index exact_shard_size(const UniformSearch& search, std::span<const Extent> tensors, Index collective_unit) {
  return detail::shard_size_below(search, tensors, collective_unit, lcm_of_prefixes(search, tensors, collective_unit));
}

UniformLayout layout_at(const UniformSearch& search, std::span<const Extent> tensors, Index shard_size) {
  if (shard_size == 0) return {0, std::vector<Index>(tensors.size(), 0)};
  // The shard size as unit: whoever's block divides it may contain whole shards.
  std::optional<std::vector<Index>> starts = search.place(shard_size, shard_size);
  RAGGED_ASSERT(starts.has_value(), "the shard size {} that was found doesn't fit", shard_size);
  return {shard_size, std::move(*starts)};
}

}  // namespace

UniformLayout plan_uniform(
    std::span<const Extent> tensors, int world_size, Index collective_unit, Index start_alignment) {
  const UniformSearch search(tensors, world_size, collective_unit, start_alignment);
  if (search.largest() == 0) return layout_at(search, tensors, 0);
  return layout_at(search, tensors, exact_shard_size(search, tensors, collective_unit));
}

UniformLayout plan_uniform_paper(
    std::span<const Extent> tensors, int world_size, Index collective_unit, Index start_alignment) {
  const UniformSearch search(tensors, world_size, collective_unit, start_alignment);
  if (search.largest() == 0) return layout_at(search, tensors, 0);
  return layout_at(search, tensors, lcm_of_prefixes(search, tensors, collective_unit));
}

Index shard_size_lower_bound(std::span<const Extent> tensors, int world_size, Index collective_unit) {
  // Only for its checks.
  const UniformSearch checked(tensors, world_size, collective_unit, 1);
  detail::PieceCounts pieces;
  for (const Extent& tensor : tensors) detail::add_pieces(pieces, tensor.numel, tensor.block, 0);
  return detail::bound_for_pieces(pieces, world_size, collective_unit);
}

}  // namespace ragged::plan
