#include "ragged/plan/partition_search.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>

#include "ragged/plan/uniform_search.h"

namespace ragged::plan::detail {
namespace {

// Real layers have up to some 3,000 states; what has more is thinned out to this.
constexpr std::size_t kMaxStates = 6144;
// Where there are more equal tensors than this, all but the last few are laid out as one long
// tensor: experts that are parameters of their own, with the shared ones behind them.
constexpr std::size_t kMaxGroups = 8;
constexpr std::size_t kSingles = 2;
// Of walks over a tensor; some 0.2 s.
constexpr Index kMaxWork = Index{1} << 19;
// Up to this many classes all orders are tried. With more it hardly pays: the four orders reach the
// same in layers of public models.
constexpr std::size_t kMaxPermuted = 4;
constexpr std::size_t kMaxFractions = 192;  // of the packing bound
constexpr Index kInfinite = std::numeric_limits<Index>::max() / 4;

template <class T>
std::size_t size_index(T i) {
  return static_cast<std::size_t>(i);
}

}  // namespace

PartitionSearch::PartitionSearch(std::span<const SearchTensor> tensors, const PlanOptions& options)
    : tensors_(tensors), options_(options) {
  build_classes();
  thin_classes();
  build_orders();
  build_states();
  fill_packing_bounds();
}

void PartitionSearch::build_classes() {
  const Index alignment = options_.start_alignment;
  std::map<std::tuple<Index, Index, Index, Index>, std::size_t> known;
  Class loose;
  for (int i = 0; size_index(i) < tensors_.size(); ++i) {
    const SearchTensor& tensor = tensors_[size_index(i)];
    // Borders lie on aligned elements, so these may be cut by any: vectors, for the most part.
    if (alignment % tensor.extent.block == 0) {
      if (loose.groups.empty()) loose.groups.resize(1);
      loose.groups[0].push_back(i);
      continue;
    }
    const auto key = std::make_tuple(tensor.extent.numel, tensor.extent.block, tensor.block, tensor.restart);
    const auto [found, is_new] = known.try_emplace(key, classes_.size());
    if (is_new) classes_.push_back({.ragged_blocks = tensor.ragged_blocks});
    classes_[found->second].groups.push_back({i});
  }
  std::vector<Class> runs;
  for (Class& one : classes_) {
    const Extent extent = tensors_[size_index(one.groups[0][0])].extent;
    one.extents = {extent};
    if (one.groups.size() <= kMaxGroups || extent.numel % extent.block != 0 || extent.numel % alignment != 0) continue;
    Class run{.groups = {{}}, .ragged_blocks = one.ragged_blocks};
    const auto singles = one.groups.end() - kSingles;
    for (auto group = one.groups.begin(); group != singles; ++group) run.groups[0].push_back(group->front());
    one.groups.erase(one.groups.begin(), singles);
    const auto count = static_cast<Index>(run.groups[0].size());
    run.extents = {{extent.numel * count, extent.block}};
    run.ragged_blocks *= count;
    runs.push_back(std::move(run));
    is_exact_ = false;
  }
  classes_.insert(classes_.end(), std::make_move_iterator(runs.begin()), std::make_move_iterator(runs.end()));
  if (!loose.groups.empty()) {
    // All but one end where the next may start.
    Extent all;
    Index saved = 0;
    for (int i : loose.groups[0]) {
      const Extent& extent = tensors_[size_index(i)].extent;
      const Index aligned = round_up(extent.numel, alignment);
      all.numel += aligned;
      saved = std::max(saved, aligned - extent.numel);
      loose.ragged_blocks += tensors_[size_index(i)].ragged_blocks;
    }
    all.numel -= saved;
    loose.extents = {all};
    classes_.push_back(std::move(loose));
  }
  for (Class& one : classes_) {
    for (const Extent& extent : one.extents) one.numel += round_up(extent.numel, alignment);
  }
  std::stable_sort(classes_.begin(), classes_.end(), [](const Class& a, const Class& b) { return a.numel > b.numel; });
}

void PartitionSearch::thin_classes() {
  const auto num_states = [&] {
    double count = 1;
    for (const Class& one : classes_) count *= one.levels() + 1;
    return count;
  };
  while (num_states() > static_cast<double>(kMaxStates)) {
    is_exact_ = false;
    const auto widest = std::max_element(
        classes_.begin(), classes_.end(), [](const Class& a, const Class& b) { return a.levels() < b.levels(); });
    if (widest->levels() > 1) {
      if (widest->levels() % 2 != 0) {  // the odd one out becomes a class of its own
        Class single = *widest;
        single.groups.resize(1);
        widest->groups.erase(widest->groups.begin());
        classes_.insert(widest + 1, std::move(single));
        continue;
      }
      std::vector<std::vector<int>> pairs;
      for (std::size_t i = 0; i < widest->groups.size(); i += 2) {
        pairs.push_back(widest->groups[i]);
        pairs.back().insert(pairs.back().end(), widest->groups[i + 1].begin(), widest->groups[i + 1].end());
      }
      widest->groups = std::move(pairs);
      const std::vector<Extent> once = widest->extents;
      widest->extents.insert(widest->extents.end(), once.begin(), once.end());
      widest->numel *= 2;
      widest->ragged_blocks *= 2;
      continue;
    }
    // The two smallest stay together from here on.
    Class last = std::move(classes_.back());
    classes_.pop_back();
    Class& joint = classes_.back();
    joint.groups[0].insert(joint.groups[0].end(), last.groups[0].begin(), last.groups[0].end());
    joint.extents.insert(joint.extents.end(), last.extents.begin(), last.extents.end());
    joint.numel += last.numel;
    joint.ragged_blocks += last.ragged_blocks;
    std::stable_sort(
        classes_.begin(), classes_.end(), [](const Class& a, const Class& b) { return a.numel > b.numel; });
  }
}

void PartitionSearch::build_orders() {
  std::vector<Entry> entries;
  for (int i = 0; size_index(i) < classes_.size(); ++i) {
    for (const Extent& extent : classes_[size_index(i)].extents) entries.push_back({i, extent});
  }
  const auto add = [&](auto is_before) {
    std::vector<Entry> order = entries;
    std::stable_sort(order.begin(), order.end(), is_before);
    orders_.push_back(std::move(order));
  };
  const PlanOrder order = options_.order;
  if (order == PlanOrder::kModule) {
    const auto first = [&](const Entry& e) { return classes_[size_index(e.of_class)].groups[0][0]; };
    add([&](const Entry& a, const Entry& b) { return first(a) < first(b); });
  }
  if (order == PlanOrder::kAuto || order == PlanOrder::kShape) {
    add([](const Entry& a, const Entry& b) { return a.extent.numel > b.extent.numel; });
    add([](const Entry& a, const Entry& b) { return a.extent.numel < b.extent.numel; });
  }
  if (order == PlanOrder::kAuto || order == PlanOrder::kBlock) {
    add([](const Entry& a, const Entry& b) { return a.extent.block > b.extent.block; });
    add([](const Entry& a, const Entry& b) { return a.extent.block < b.extent.block; });
  }
  if (order == PlanOrder::kAuto && classes_.size() <= kMaxPermuted) {
    std::vector<int> ranks(classes_.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    do {
      add([&](const Entry& a, const Entry& b) {
        return ranks[size_index(a.of_class)] < ranks[size_index(b.of_class)];
      });
    } while (std::next_permutation(ranks.begin(), ranks.end()));
  }
}

void PartitionSearch::build_states() {
  std::size_t count = 1;
  for (const Class& one : classes_) {
    strides_.push_back(count);
    count *= size_index(one.levels() + 1);
  }
  states_.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    State& state = states_[i];
    state.takes.resize(classes_.size());
    state.first_class = static_cast<int>(classes_.size());
    for (std::size_t c = classes_.size(); c-- > 0;) {
      const Class& one = classes_[c];
      const Index take = static_cast<Index>(i / strides_[c] % size_index(one.levels() + 1));
      state.takes[c] = static_cast<int>(take);
      if (take == 0) continue;
      state.first_class = static_cast<int>(c);
      state.numel += take * one.numel;
      state.ragged_blocks += take * one.ragged_blocks;
    }
  }
}

// The bound of bound_for_pieces() for all states: units of every fraction add up over classes. In
// floating point, always rounded down.
void PartitionSearch::fill_packing_bounds() {
  PieceCounts all;
  std::vector<PieceCounts> pieces(classes_.size());
  Index numel = 0;
  for (std::size_t c = 0; c < classes_.size(); ++c) {
    for (int i : classes_[c].groups[0]) {
      const SearchTensor& tensor = tensors_[size_index(i)];
      add_pieces(pieces[c], tensor.extent.numel, tensor.block, tensor.restart);
    }
    for (const auto& [piece, count] : pieces[c]) {
      all[piece] += count;
      numel += piece * count * classes_[c].levels();
    }
  }
  const double ranks = options_.world_size;
  struct Fraction {
    Index piece;
    Index parts;
    double size() const { return static_cast<double>(piece) / static_cast<double>(parts); }
  };
  const Index most_parts = std::min<Index>(64, std::numeric_limits<Index>::max() / 4 / std::max<Index>(numel, 1));
  std::vector<Fraction> units;  // largest first
  for (const auto& [piece, unused] : all) {
    for (Index parts = 1; parts <= most_parts; ++parts) units.push_back({piece, parts});
  }
  std::sort(units.begin(), units.end(), [](const Fraction& a, const Fraction& b) { return a.size() > b.size(); });
  if (units.size() > kMaxFractions) units.resize(kMaxFractions);

  const std::size_t width = units.size();
  std::vector<std::vector<double>> weights(classes_.size(), std::vector<double>(width + 1));
  for (std::size_t c = 0; c < classes_.size(); ++c) {
    for (const auto& [piece, count] : pieces[c]) {
      for (std::size_t u = 0; u < width; ++u) {
        weights[c][u] += static_cast<double>(piece * units[u].parts / units[u].piece * count);
      }
      weights[c][width] += static_cast<double>(piece * count);
    }
  }
  std::vector<double> sum(width + 1);
  for (State& state : states_) {
    std::fill(sum.begin(), sum.end(), 0.0);
    for (std::size_t c = 0; c < classes_.size(); ++c) {
      if (state.takes[c] == 0) continue;
      for (std::size_t u = 0; u <= width; ++u) sum[u] += weights[c][u] * state.takes[c];
    }
    double bound = sum[width] / ranks;
    for (std::size_t u = 0; u < width; ++u) bound = std::max(bound, units[u].size() * std::ceil(sum[u] / ranks - 1e-6));
    state.packed = round_up(static_cast<Index>(std::ceil(bound * (1 - 1e-12))), options_.collective_unit);
  }
}

Index PartitionSearch::ragged_cost(const State& state) const {
  const PlanCost& cost = options_.cost;
  if (state.numel == 0) return 0;
  return round_up(state.numel, options_.collective_unit) + cost.ragged_segment +
      cost.ragged_block * state.ragged_blocks;
}

// What a state takes at least, whatever leaves for the tail.
void PartitionSearch::fill_least(Index max_ragged_blocks, Index block_cost) {
  for (std::size_t i = 1; i < states_.size(); ++i) {
    State& state = states_[i];
    state.at_least = options_.world_size * state.packed;
    for (std::size_t c = 0; c < classes_.size(); ++c) {
      if (state.takes[c] == 0 || classes_[c].ragged_blocks > max_ragged_blocks) continue;
      const Index tail = classes_[c].numel + block_cost * classes_[c].ragged_blocks;
      state.at_least = std::min(state.at_least, tail + states_[i - strides_[c]].at_least);
    }
  }
}

Index PartitionSearch::bound(Index max_ragged_blocks) {
  fill_least(max_ragged_blocks, 0);
  return states_.back().at_least;
}

// The shard size if it is below `cutoff`, else `cutoff`.
Index PartitionSearch::evaluate(State& state, Index cutoff) {
  if (state.shard != kUnknown) return std::min(state.shard, cutoff);
  if (std::max(state.packed, state.none_below) >= cutoff) return cutoff;
  Index best = cutoff;
  std::vector<Extent> extents;
  for (std::size_t o = 0; o < orders_.size() && best > state.packed; ++o) {
    extents.clear();
    for (const Entry& entry : orders_[o]) {
      extents.insert(extents.end(), size_index(state.takes[size_index(entry.of_class)]), entry.extent);
    }
    work_ += static_cast<Index>(extents.size());
    if (work_ > kMaxWork) {
      is_exact_ = false;
      return cutoff;
    }
    const UniformSearch search(extents, options_.world_size, options_.collective_unit, options_.start_alignment);
    const Index found = shard_size_below(search, extents, options_.collective_unit, best);
    if (found < best) {
      best = found;
      state.order = static_cast<int>(o);
    }
    if (extents.size() == 1) break;
  }
  if (best < cutoff) {
    state.shard = best;
  } else {
    state.none_below = cutoff;
  }
  return best;
}

// Calls visit(part) for every part of `whole` that holds some of its first class; `whole` itself
// last.
template <class Visit>
void PartitionSearch::for_each_part(std::size_t whole, Visit visit) const {
  const State& state = states_[whole];
  const std::size_t num_classes = classes_.size();
  const std::size_t first = size_index(state.first_class);
  std::vector<int> takes(num_classes, 0);
  takes[first] = 1;
  std::size_t part = strides_[first];
  while (true) {
    visit(part);
    std::size_t c = first;
    while (c < num_classes && takes[c] == state.takes[c]) {
      const int low = c == first ? 1 : 0;
      part -= strides_[c] * size_index(takes[c] - low);
      takes[c] = low;
      ++c;
    }
    if (c == num_classes) return;
    ++takes[c];
    part += strides_[c];
  }
}

void PartitionSearch::join_states(Index budget, Index max_ragged_blocks) {
  const std::size_t all = states_.size() - 1;
  const auto num_layers = size_index(options_.max_uniform_segments);
  for (std::size_t k = 1; k < num_layers; ++k) {
    const std::vector<Index>& once = cost_[0];
    const std::vector<Index>& before = cost_[k - 1];
    std::vector<Index>& now = cost_[k];
    now = before;
    for (std::size_t whole = 1; whole <= all; ++whole) {
      if (states_[whole].at_least + states_[all - whole].at_least >= budget) continue;
      // The last layer is only asked for what a tail may leave.
      if (k + 1 == num_layers && states_[all - whole].ragged_blocks > max_ragged_blocks) continue;
      for_each_part(
          whole, [&](std::size_t part) { now[whole] = std::min(now[whole], once[part] + before[whole - part]); });
    }
  }
}

bool PartitionSearch::try_budget(Index budget, Index max_ragged_blocks, Partition& partition) {
  const Index segment_cost = options_.cost.uniform_segment;
  const std::size_t all = states_.size() - 1;
  cost_.assign(size_index(options_.max_uniform_segments), std::vector<Index>(states_.size(), kInfinite));
  cost_[0][0] = 0;
  for (std::size_t i = 1; i < states_.size(); ++i) {
    const Index room = budget - segment_cost - states_[all - i].at_least;  // its cost must be below
    if (room <= states_[i].packed * options_.world_size) continue;
    const Index cutoff = ceil_div(room, options_.world_size);
    const Index shard = evaluate(states_[i], cutoff);
    if (shard < cutoff) cost_[0][i] = shard * options_.world_size + segment_cost;
  }
  join_states(budget, max_ragged_blocks);
  Index best = budget;
  std::size_t best_tail = states_.size();
  for (std::size_t tail = 0; tail < states_.size(); ++tail) {
    if (states_[tail].ragged_blocks > max_ragged_blocks) continue;
    const Index cost = cost_.back()[all - tail] + ragged_cost(states_[tail]);
    if (cost >= best) continue;
    best = cost;
    best_tail = tail;
  }
  if (best_tail == states_.size()) return false;
  partition = reconstruct(all - best_tail, best_tail);
  return true;
}

Partition PartitionSearch::reconstruct(std::size_t uniform, std::size_t ragged) const {
  Partition partition{.is_exact = is_exact_};
  std::vector<std::size_t> next(classes_.size(), 0);
  const auto take_from = [&](std::size_t c, std::vector<int>& to) {
    const std::vector<int>& group = classes_[c].groups[next[c]++];
    to.insert(to.end(), group.begin(), group.end());
  };
  for (std::size_t c = 0; c < classes_.size(); ++c) {
    for (int i = 0; i < states_[ragged].takes[c]; ++i) take_from(c, partition.ragged);
  }
  std::sort(partition.ragged.begin(), partition.ragged.end());

  std::size_t k = cost_.size() - 1;
  std::size_t rest = uniform;
  while (rest != 0) {
    while (k > 0 && cost_[k - 1][rest] == cost_[k][rest]) --k;
    std::size_t chosen = rest;
    if (k > 0) {
      for_each_part(rest, [&](std::size_t part) {
        if (cost_[0][part] + cost_[k - 1][rest - part] == cost_[k][rest]) chosen = part;
      });
      --k;
    }
    const State& state = states_[chosen];
    std::vector<int> members;
    // Compound classes have several extents; a group joins the order at its first.
    std::vector<bool> done(classes_.size(), false);
    for (const Entry& entry : orders_[size_index(state.order)]) {
      const std::size_t c = size_index(entry.of_class);
      if (done[c]) continue;
      done[c] = true;
      for (int i = 0; i < state.takes[c]; ++i) take_from(c, members);
    }
    partition.segments.push_back(std::move(members));
    rest -= chosen;
  }
  return partition;
}

Partition PartitionSearch::best(Index max_ragged_blocks) {
  Partition partition{.is_exact = is_exact_};
  if (classes_.empty()) return partition;
  fill_least(max_ragged_blocks, options_.cost.ragged_block);
  State& all = states_.back();
  const Index single = evaluate(all, round_up(all.numel, options_.collective_unit) + 1) * options_.world_size;
  const Index enough = single + options_.cost.uniform_segment + 1;
  const double numel = static_cast<double>(all.numel);
  for (const double padding : {1e-4, 1e-3, 4e-3, 0.016, 0.05, 0.15, 0.5, 2.0}) {
    const double budget = static_cast<double>(all.at_least + options_.cost.uniform_segment) + numel * padding + 1;
    if (budget >= static_cast<double>(enough)) break;
    if (try_budget(static_cast<Index>(budget), max_ragged_blocks, partition)) return partition;
  }
  const bool found = try_budget(enough, max_ragged_blocks, partition);
  RAGGED_ASSERT(found, "one segment for everything is a partition");
  return partition;
}

}  // namespace ragged::plan::detail
