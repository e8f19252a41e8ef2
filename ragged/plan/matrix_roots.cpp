#include "ragged/plan/matrix_roots.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <map>
#include <numeric>

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

// Those that cost least an element first: what is over the limit then frees the most load for the fewest bytes.
void keep_local(
    std::span<const RootMatrix> matrices, const RootOptions& options, std::vector<double>& loads,
    const std::function<void(std::size_t, int)>& assign) {
  double total = 0.0;
  double largest = 0.0;
  std::vector<std::size_t> local;
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    total += matrices[i].cost;
    largest = std::max(largest, matrices[i].cost);
    if (sole_holder(matrices[i].pieces, matrices[i].numel) >= 0) local.push_back(i);
  }
  const auto density = [&](std::size_t i) { return matrices[i].cost / static_cast<double>(matrices[i].numel); };
  std::sort(local.begin(), local.end(), [&](std::size_t a, std::size_t b) {
    if (density(a) != density(b)) return density(a) < density(b);
    return a < b;
  });
  // Times infinity, 0 would be no number.
  const double fair =
      std::max({total / static_cast<double>(loads.size()), largest, std::numeric_limits<double>::min()});
  const double limit = options.local_limit * fair;
  for (const std::size_t i : local) {
    const int holder = sole_holder(matrices[i].pieces, matrices[i].numel);
    int best = holder;  // among the replicas
    for (int k = 1; k < options.replicas; ++k) {
      const int candidate = k * options.world_size + holder;
      if (loads[static_cast<std::size_t>(candidate)] < loads[static_cast<std::size_t>(best)]) best = candidate;
    }
    double& load = loads[static_cast<std::size_t>(best)];
    if (load + matrices[i].cost > limit) continue;
    load += matrices[i].cost;
    assign(i, best);
  }
}

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

RootPlan assign_roots(std::span<const RootMatrix> matrices, const RootOptions& options) {
  check(matrices, options);
  RootPlan plan;
  plan.roots.assign(matrices.size(), -1);
  std::vector<double> loads(static_cast<std::size_t>(options.world_size * options.replicas), 0.0);
  BucketLoads bucket_loads;
  const auto assign = [&](std::size_t i, int root) {
    plan.roots[i] = root;
    bucket_loads[{matrices[i].bucket, root}] += matrices[i].cost;
  };
  keep_local(matrices, options, loads, assign);
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    if (plan.roots[i] < 0) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    if (matrices[a].cost != matrices[b].cost) return matrices[a].cost > matrices[b].cost;
    if (matrices[a].numel != matrices[b].numel) return matrices[a].numel > matrices[b].numel;
    return a < b;
  });
  Candidates candidates(std::move(loads));
  for (const std::size_t i : order) {
    const int root = choose(candidates, bucket_loads, matrices[i], options.world_size);
    assign(i, root);
    candidates.add(root, matrices[i].cost);
    plan.moved_numel += matrices[i].numel - piece(matrices[i], root % options.world_size);
  }
  plan.loads = candidates.loads();
  return plan;
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
