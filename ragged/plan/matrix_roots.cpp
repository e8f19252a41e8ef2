#include "ragged/plan/matrix_roots.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>

namespace ragged::plan {
namespace {

// Candidates in the order in which LPT would take them. A sorted vector would be as good for tens of ranks; this keeps
// thousands of matrices on hundreds of ranks cheap: a choice looks only at ranks whose load ties.
class Candidates {
 public:
  explicit Candidates(std::vector<double> loads) : loads_(std::move(loads)) {
    for (int c = 0; c < static_cast<int>(loads_.size()); ++c)
      by_load_[loads_[static_cast<std::size_t>(c)]].push_back(c);
  }

  /// Of equal load, ascending.
  const std::vector<int>& least_loaded() const { return by_load_.begin()->second; }

  void add(int candidate, double cost) {
    const auto at = by_load_.begin();
    std::erase(at->second, candidate);
    if (at->second.empty()) by_load_.erase(at);
    double& load = loads_[static_cast<std::size_t>(candidate)];
    load += cost;
    std::vector<int>& tied = by_load_[load];
    tied.insert(std::lower_bound(tied.begin(), tied.end(), candidate), candidate);
  }

  const std::vector<double>& loads() const { return loads_; }

 private:
  std::vector<double> loads_;
  std::map<double, std::vector<int>> by_load_;
};

// Load by (bucket, candidate); absent is none.
using BucketLoads = std::map<std::pair<int, int>, double>;

double load_of(const BucketLoads& loads, int bucket, int candidate) {
  const auto found = loads.find({bucket, candidate});
  return found == loads.end() ? 0.0 : found->second;
}

Index piece(const RootMatrix& matrix, int rank) {
  for (const HeldPiece& held : matrix.pieces) {
    if (held.rank == rank) return held.interval.size();
  }
  return 0;
}

int choose(const Candidates& candidates, const BucketLoads& bucket_loads, const RootMatrix& matrix, int world_size) {
  int best = -1;
  for (const int candidate : candidates.least_loaded()) {
    if (best < 0) {
      best = candidate;
      continue;
    }
    const double load = load_of(bucket_loads, matrix.bucket, candidate);
    const double best_load = load_of(bucket_loads, matrix.bucket, best);
    if (load > best_load) continue;
    if (load < best_load || piece(matrix, candidate % world_size) > piece(matrix, best % world_size)) best = candidate;
  }
  return best;
}

void check(std::span<const RootMatrix> matrices, const RootOptions& options) {
  RAGGED_CHECK(
      options.world_size >= 1 && options.replicas >= 1,
      "[matrix_roots] Expected at least one rank and replica, but got {} and {}.", options.world_size,
      options.replicas);
  RAGGED_CHECK(
      options.local_limit >= 0.0, "[matrix_roots] Expected local_limit >= 0, but got {}.", options.local_limit);
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    for (const HeldPiece& held : matrices[i].pieces) {
      RAGGED_CHECK(
          held.rank >= 0 && held.rank < options.world_size,
          "[matrix_roots] Expected pieces of ranks below {}, but got {} (matrix {}).", options.world_size, held.rank,
          i);
    }
  }
}

bool moves(const RootMatrix& matrix, int holder, int root, int world_size) {
  return matrix.numel > 0 && holder != root % world_size;
}

// Matrices in the orders in which they are dealt out, and who holds them.
class Assigner {
 public:
  Assigner(std::span<const RootMatrix> matrices, const RootOptions& options) : matrices_(matrices), options_(options) {
    std::vector<double> costs;
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      const int holder = sole_holder(matrices[i].pieces, matrices[i].numel);
      holders_.push_back(holder);
      costs.push_back(matrices[i].cost);
      longest_first_.push_back(i);
      if (holder >= 0) {
        local_.push_back(i);
      } else if (matrices[i].numel > 0) {
        cut_buckets_.insert(matrices[i].bucket);
      }
    }
    // Times infinity, 0 would be no number.
    limit_ = options.local_limit *
        std::max(load_bound(std::move(costs), num_candidates()), std::numeric_limits<double>::min());
    std::sort(longest_first_.begin(), longest_first_.end(), [&](std::size_t a, std::size_t b) {
      if (matrices[a].cost != matrices[b].cost) return matrices[a].cost > matrices[b].cost;
      if (matrices[a].numel != matrices[b].numel) return matrices[a].numel > matrices[b].numel;
      return a < b;
    });
    // Those that cost least an element first: what is over the limit then frees the most load for the fewest bytes.
    const auto density = [&](std::size_t i) { return matrices[i].cost / static_cast<double>(matrices[i].numel); };
    std::sort(local_.begin(), local_.end(), [&](std::size_t a, std::size_t b) {
      if (density(a) != density(b)) return density(a) < density(b);
      return a < b;
    });
  }

  /// [Note: roots] in the header.
  RootPlan run() const {
    RootPlan best = assign({});
    if (options_.local_limit > 0.0 && largest(best.loads) <= limit_) return best;
    std::set<int> open = cut_buckets_;
    while (options_.local_limit > 0.0) {
      // What stays in closed buckets can't get lighter: no need to deal out the rest while that alone is too much.
      std::vector<double> loads(static_cast<std::size_t>(num_candidates()), 0.0);
      std::vector<int> roots(matrices_.size(), -1);
      keep(open, false, roots, loads);
      if (largest(loads) <= limit_) {
        RootPlan plan = assign(open);
        loads = plan.loads;
        if (largest(plan.loads) < largest(best.loads)) best = std::move(plan);
        if (largest(best.loads) <= limit_) return best;
      }
      const auto next = heaviest_closed(open, roots, loads);
      if (!next) break;
      open.insert(*next);
    }
    RootPlan none_stays = deal_out(std::vector<int>(matrices_.size(), -1), no_loads());
    return options_.local_limit > 0.0 && largest(best.loads) <= largest(none_stays.loads) ? best : none_stays;
  }

 private:
  int num_candidates() const { return options_.world_size * options_.replicas; }
  std::vector<double> no_loads() const { return std::vector<double>(static_cast<std::size_t>(num_candidates()), 0.0); }
  static double largest(const std::vector<double>& loads) { return *std::max_element(loads.begin(), loads.end()); }

  // Local matrices stay: those of closed buckets, or those of open ones as long as their rank is within the limit.
  void keep(const std::set<int>& open, bool of_open, std::vector<int>& roots, std::vector<double>& loads) const {
    for (const std::size_t i : local_) {
      if (open.contains(matrices_[i].bucket) != of_open) continue;
      int best = holders_[i];  // among the replicas
      for (int k = 1; k < options_.replicas; ++k) {
        const int candidate = k * options_.world_size + holders_[i];
        if (loads[static_cast<std::size_t>(candidate)] < loads[static_cast<std::size_t>(best)]) best = candidate;
      }
      double& load = loads[static_cast<std::size_t>(best)];
      if (of_open && load + matrices_[i].cost > limit_) continue;
      load += matrices_[i].cost;
      roots[i] = best;
    }
  }

  RootPlan assign(const std::set<int>& open) const {
    std::vector<int> roots(matrices_.size(), -1);
    std::vector<double> loads = no_loads();
    keep(open, false, roots, loads);
    keep(open, true, roots, loads);
    return deal_out(std::move(roots), std::move(loads));
  }

  // All that has no root yet, by LPT.
  RootPlan deal_out(std::vector<int> roots, std::vector<double> loads) const {
    BucketLoads bucket_loads;
    for (std::size_t i = 0; i < roots.size(); ++i) {
      if (roots[i] >= 0) bucket_loads[{matrices_[i].bucket, roots[i]}] += matrices_[i].cost;
    }
    Candidates candidates(std::move(loads));
    for (const std::size_t i : longest_first_) {
      if (roots[i] >= 0) continue;
      roots[i] = choose(candidates, bucket_loads, matrices_[i], options_.world_size);
      bucket_loads[{matrices_[i].bucket, roots[i]}] += matrices_[i].cost;
      candidates.add(roots[i], matrices_[i].cost);
    }
    RootPlan plan{.roots = std::move(roots), .loads = candidates.loads()};
    std::set<int> moving;
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      if (!moves(matrices_[i], holders_[i], plan.roots[i], options_.world_size)) continue;
      moving.insert(matrices_[i].bucket);
      plan.moved_numel += matrices_[i].numel - piece(matrices_[i], plan.roots[i] % options_.world_size);
    }
    plan.num_moving_buckets = static_cast<int>(moving.size());
    return plan;
  }

  // The closed bucket whose local matrices weigh most on candidates above the limit; none where no bucket's do.
  std::optional<int> heaviest_closed(
      const std::set<int>& open, const std::vector<int>& roots, const std::vector<double>& loads) const {
    std::map<int, double> weights;
    for (const std::size_t i : local_) {
      if (open.contains(matrices_[i].bucket) || roots[i] < 0) continue;
      if (loads[static_cast<std::size_t>(roots[i])] > limit_) weights[matrices_[i].bucket] += matrices_[i].cost;
    }
    std::optional<int> heaviest;
    for (const auto& [bucket, weight] : weights) {
      if (!heaviest || weight > weights[*heaviest]) heaviest = bucket;
    }
    return heaviest;
  }

  std::span<const RootMatrix> matrices_;
  const RootOptions& options_;
  std::vector<int> holders_;  // by matrix
  std::vector<std::size_t> longest_first_;
  std::vector<std::size_t> local_;  // lightest an element first
  std::set<int> cut_buckets_;
  double limit_ = 0.0;
};

void mix(std::uint64_t& state, std::uint64_t value) {  // FNV-1a over 8 bytes
  for (int byte = 0; byte < 8; ++byte) {
    state ^= (value >> (8 * byte)) & 0xFFU;
    state *= 0x100000001B3ULL;
  }
}

}  // namespace

double newton_schulz_cost(Index rows, Index cols, int steps) {
  const auto shorter = static_cast<double>(std::min(rows, cols));
  const auto longer = static_cast<double>(std::max(rows, cols));
  return steps * (4.0 * shorter * shorter * longer + 2.0 * shorter * shorter * shorter);
}

std::vector<HeldPiece> pieces_of(std::span<const Interval> held, Interval range) {
  std::vector<HeldPiece> pieces;
  for (int r = 0; r < static_cast<int>(held.size()); ++r) {
    const Interval part = layout::intersect(held[static_cast<std::size_t>(r)], range);
    if (!part.empty()) pieces.push_back({r, part.shifted(-range.begin)});
  }
  return pieces;
}

int sole_holder(std::span<const HeldPiece> pieces, Index numel) {
  return pieces.size() == 1 && numel > 0 && pieces[0].interval.size() == numel ? pieces[0].rank : -1;
}

double load_bound(std::vector<double> costs, int candidates) {
  std::sort(costs.rbegin(), costs.rend());
  double bound = std::accumulate(costs.begin(), costs.end(), 0.0) / candidates;
  const auto step = static_cast<std::size_t>(candidates);
  for (std::size_t k = 0; k * step < costs.size(); ++k) {
    double smallest = 0.0;
    for (std::size_t i = 0; i <= k; ++i) smallest += costs[k * step - i];
    bound = std::max(bound, smallest);
  }
  return bound;
}

RootPlan assign_roots(std::span<const RootMatrix> matrices, const RootOptions& options) {
  check(matrices, options);
  return Assigner(matrices, options).run();
}

std::uint64_t hash(const RootPlan& plan) {
  std::uint64_t state = 0xCBF29CE484222325ULL;
  mix(state, plan.roots.size());
  for (const int root : plan.roots) mix(state, static_cast<std::uint64_t>(root));
  mix(state, plan.loads.size());
  for (const double load : plan.loads) mix(state, std::bit_cast<std::uint64_t>(load));
  mix(state, static_cast<std::uint64_t>(plan.moved_numel));
  return state;
}

}  // namespace ragged::plan
