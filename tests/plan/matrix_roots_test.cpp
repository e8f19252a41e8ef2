// Roots of matrices: numbers worked out by hand, and balance over the bundled models.
#include "ragged/plan/matrix_roots.h"

#include <filesystem>
#include <numeric>
#include <set>

#include <fmt/ranges.h>

#include "ragged/plan/planner.h"
#include "tests/plan/plans.h"
#include "tests/support/expect_error.h"

namespace ragged::plan {
namespace {

using ::ragged::testing::bundled_model;

std::vector<RootMatrix> without_holders(const std::vector<std::pair<Index, Index>>& shapes) {
  std::vector<RootMatrix> matrices;
  for (const auto& [rows, cols] : shapes) {
    matrices.push_back({.cost = newton_schulz_cost(rows, cols, 5), .numel = rows * cols});
  }
  return matrices;
}

TEST(MatrixRoots, cost_counts_the_three_products) {
  // 64 x 256: X X^T and B X are 2 * 64 * 64 * 256 each, A A is 2 * 64^3.
  EXPECT_EQ(newton_schulz_cost(64, 256, 1), 2.0 * 2 * 64 * 64 * 256 + 2.0 * 64 * 64 * 64);
  EXPECT_EQ(newton_schulz_cost(64, 256, 5), newton_schulz_cost(256, 64, 5));
  EXPECT_NEAR(newton_schulz_cost(4096, 14336, 5), 5.50e12, 0.01e12);
  EXPECT_EQ(newton_schulz_cost(0, 64, 5), 0.0);
}

TEST(MatrixRoots, go_to_the_least_loaded_longest_first) {
  const auto matrices = without_holders({{64, 64}, {64, 256}, {256, 64}, {128, 128}, {64, 128}, {32, 512}});
  const RootPlan plan = assign_roots(matrices, {.world_size = 3, .local_limit = 0.0});
  EXPECT_EQ(plan.roots, (std::vector<int>{2, 1, 2, 0, 1, 2}));
  EXPECT_EQ(plan.loads, (std::vector<double>{62914560, 36700160, 42270720}));
  EXPECT_EQ(plan.moved_numel, 64 * 64 + 2 * 64 * 256 + 128 * 128 + 64 * 128 + 32 * 512);
}

// Four equal matrices over two ranks; rank 0 holds the first whole.
TEST(MatrixRoots, whole_matrices_stay_and_count_as_load) {
  auto matrices = without_holders({{8, 8}, {8, 8}, {8, 8}, {8, 8}});
  matrices[0].pieces = {{0, {0, 64}}};
  matrices[1].pieces = {{0, {0, 24}}, {1, {24, 64}}};
  const RootPlan plan = assign_roots(matrices, {.world_size = 2});
  EXPECT_EQ(plan.roots, (std::vector<int>{0, 1, 0, 1}));
  EXPECT_EQ(plan.moved_numel, 24 + 64 + 64);
  EXPECT_EQ(sole_holder(matrices[0].pieces, 64), 0);
  EXPECT_EQ(sole_holder(matrices[1].pieces, 64), -1);
  EXPECT_EQ(sole_holder({}, 0), -1);
  const RootPlan moved = assign_roots(matrices, {.world_size = 2, .local_limit = 0.0});
  EXPECT_EQ(moved.roots, (std::vector<int>{0, 1, 0, 1}));  // it ties, and rank 0 has the larger piece
  matrices[0].pieces = {{1, {0, 64}}};
  EXPECT_EQ(assign_roots(matrices, {.world_size = 2, .local_limit = 0.0}).roots[0], 1);
}

TEST(MatrixRoots, ties_prefer_the_largest_piece_then_the_lowest_rank) {
  auto matrices = without_holders({{4, 8}, {4, 8}, {4, 8}});
  matrices[0].pieces = {{1, {0, 10}}, {2, {10, 32}}};
  matrices[1].pieces = {{1, {0, 16}}, {3, {16, 32}}};
  const RootPlan plan = assign_roots(matrices, {.world_size = 4});
  EXPECT_EQ(plan.roots, (std::vector<int>{2, 1, 0}));
}

TEST(MatrixRoots, ties_prefer_a_rank_that_the_bucket_has_not_used) {
  auto matrices = without_holders({{4, 4}, {4, 4}, {4, 4}, {4, 4}});
  for (int i = 0; i < 4; ++i) matrices[static_cast<std::size_t>(i)].bucket = i / 2;
  matrices[3].pieces = {{0, {0, 16}}};  // wants rank 0, but by then loads are (1, 1) and bucket 1 has used it
  const RootPlan plan = assign_roots(matrices, {.world_size = 2, .local_limit = 0.0});
  EXPECT_EQ(plan.roots, (std::vector<int>{0, 1, 0, 1}));
}

TEST(MatrixRoots, replicas_divide_what_each_of_them_holds) {
  auto matrices = without_holders({{8, 8}, {8, 8}, {8, 8}, {8, 8}});
  for (RootMatrix& matrix : matrices) matrix.pieces = {{1, {0, 64}}};
  const RootPlan plan =
      assign_roots(matrices, {.world_size = 2, .replicas = 2, .local_limit = std::numeric_limits<double>::infinity()});
  EXPECT_EQ(plan.roots, (std::vector<int>{1, 3, 1, 3}));  // rank 1 of replica 0, of replica 1, ...
  EXPECT_EQ(plan.moved_numel, 0);
}

TEST(MatrixRoots, pieces_are_counted_in_the_range) {
  const std::vector<Interval> held{{0, 10}, {10, 10}, {10, 25}, {25, 40}};
  EXPECT_EQ(pieces_of(held, {20, 40}), (std::vector<HeldPiece>{{2, {0, 5}}, {3, {5, 20}}}));
  EXPECT_EQ(pieces_of(held, {0, 10}), (std::vector<HeldPiece>{{0, {0, 10}}}));
  EXPECT_TRUE(pieces_of(held, {5, 5}).empty());
}

TEST(MatrixRoots, hash_sees_every_root) {
  const auto matrices = without_holders({{8, 8}, {8, 4}, {2, 8}});
  RootPlan plan = assign_roots(matrices, {.world_size = 2});
  const std::uint64_t before = hash(plan);
  EXPECT_EQ(before, hash(assign_roots(matrices, {.world_size = 2})));
  plan.roots[2] ^= 1;
  EXPECT_NE(before, hash(plan));
}

TEST(MatrixRoots, refuse_what_makes_no_sense) {
  auto matrices = without_holders({{8, 8}});
  EXPECT_INVALID(assign_roots(matrices, {.world_size = 0}), "at least one rank and replica");
  EXPECT_INVALID(assign_roots(matrices, {.world_size = 2, .replicas = 0}), "at least one rank and replica");
  matrices[0].pieces = {{2, {0, 64}}};
  EXPECT_INVALID(assign_roots(matrices, {.world_size = 2}), "ranks below 2, but got 2 (matrix 0)");
}

// --- the bound, and what it takes to come near it ---

double largest(const RootPlan& plan) {
  return *std::max_element(plan.loads.begin(), plan.loads.end());
}

constexpr double kAllStay = std::numeric_limits<double>::infinity();

// Of all assignments the one with the least largest load, by trying them all.
double best_by_trial(const std::vector<double>& costs, int candidates) {
  std::vector<int> roots(costs.size(), 0);
  double best = std::numeric_limits<double>::infinity();
  while (true) {
    std::vector<double> loads(static_cast<std::size_t>(candidates), 0.0);
    for (std::size_t i = 0; i < costs.size(); ++i) loads[static_cast<std::size_t>(roots[i])] += costs[i];
    best = std::min(best, *std::max_element(loads.begin(), loads.end()));
    std::size_t i = 0;
    while (i < roots.size() && ++roots[i] == candidates) roots[i++] = 0;
    if (i == roots.size()) return best;
  }
}

TEST(MatrixRoots, the_bound_counts_the_mean_and_who_must_share) {
  EXPECT_EQ(load_bound({}, 3), 0.0);
  EXPECT_EQ(load_bound({2, 2, 2}, 3), 2.0);
  EXPECT_EQ(load_bound({9, 1, 1}, 2), 9.0);            // the largest
  EXPECT_EQ(load_bound({4, 3, 5, 4}, 3), 7.0);         // two of four share
  EXPECT_EQ(load_bound({4, 4, 4, 4, 4, 0}, 2), 12.0);  // three of five
  // GPT-2 on 32 ranks, in units of 768^3: of 33 matrices of 14 and more two share a rank. The mean is 21.
  std::vector<double> gpt2;
  for (int layer = 0; layer < 12; ++layer) gpt2.insert(gpt2.end(), {14, 6, 18, 18});
  EXPECT_EQ(load_bound(gpt2, 32), 28.0);
  testing::Seeded random(7);
  for (int i = 0; i < 300; ++i) {
    std::vector<double> costs(static_cast<std::size_t>(random.between(0, 7)));
    for (double& cost : costs) cost = static_cast<double>(random.between(0, 9));
    const int candidates = static_cast<int>(random.between(1, 3));
    EXPECT_LE(load_bound(costs, candidates), best_by_trial(costs, candidates))
        << fmt::format("{}", fmt::join(costs, " "));
  }
}

// Two ranks hold four equal matrices, rank 0 three of them: two buckets, the second with a cut one.
TEST(MatrixRoots, matrices_leave_only_for_balance_and_first_where_a_bucket_communicates_anyway) {
  const auto at = [](int rank) { return std::vector<HeldPiece>{{rank, {0, 64}}}; };
  auto matrices = without_holders({{8, 8}, {8, 8}, {8, 8}, {8, 8}, {2, 8}});
  for (std::size_t i = 0; i < 4; ++i) matrices[i].pieces = at(i < 3 ? 0 : 1);
  matrices[4].pieces = {{0, {0, 8}}, {1, {8, 16}}};
  for (std::size_t i = 2; i < 5; ++i) matrices[i].bucket = 1;
  // Three on rank 0 are 1.5 times what is fair.
  const RootPlan loose = assign_roots(matrices, {.world_size = 2, .local_limit = 1.5});
  EXPECT_EQ(loose.roots, (std::vector<int>{0, 0, 0, 1, 1}));
  EXPECT_EQ(loose.num_moving_buckets, 1);
  const RootPlan plan = assign_roots(matrices, {.world_size = 2});
  EXPECT_EQ(plan.roots, (std::vector<int>{0, 0, 1, 1, 0}));
  EXPECT_EQ(plan.num_moving_buckets, 1);  // the first still says nothing
  EXPECT_EQ(plan.moved_numel, 64 + 8);
  // Without the cut one a bucket has to begin: the one that weighs most on rank 0.
  matrices.pop_back();
  const RootPlan opened = assign_roots(matrices, {.world_size = 2});
  EXPECT_EQ(std::accumulate(opened.roots.begin(), opened.roots.end(), 0), 2);
  EXPECT_EQ(opened.num_moving_buckets, 1);
  EXPECT_EQ(opened.roots[2], 0);
}

double bound_of(const std::vector<RootMatrix>& matrices, int world_size) {
  std::vector<double> costs;
  for (const RootMatrix& matrix : matrices) costs.push_back(matrix.cost);
  return load_bound(costs, world_size);
}

// Random layouts: whatever is local stays where all staying is good enough, and else the limit holds or LPT does no
// better.
TEST(MatrixRoots, random_layouts_stay_or_come_within_the_limit) {
  testing::Seeded random(11);
  int stayed = 0;
  int moved = 0;
  for (int i = 0; i < 400; ++i) {
    const int ranks = static_cast<int>(random.between(1, 5));
    const int replicas = static_cast<int>(random.between(1, 2));
    std::vector<RootMatrix> matrices;
    for (Index m = random.between(0, 30); m > 0; --m) {
      const Index rows = random.between(1, 6);
      const Index cols = random.between(1, 6);
      RootMatrix matrix{.cost = newton_schulz_cost(rows, cols, 5), .numel = rows * cols};
      matrix.bucket = static_cast<int>(random.between(0, 3));
      const Index border = random.between(0, 3) == 0 ? random.between(0, matrix.numel) : 0;
      const int rank = static_cast<int>(random.between(0, ranks - 1));
      if (border > 0 && rank > 0) matrix.pieces.push_back({rank - 1, {0, border}});
      const Index begin = matrix.pieces.empty() ? 0 : border;
      if (begin < matrix.numel) matrix.pieces.push_back({rank, {begin, matrix.numel}});
      matrices.push_back(matrix);
    }
    SCOPED_TRACE(fmt::format("case {}: {} matrices on {} x {}", i, matrices.size(), replicas, ranks));
    const auto with = [&](double limit) {
      return assign_roots(matrices, {.world_size = ranks, .replicas = replicas, .local_limit = limit});
    };
    const RootPlan plan = with(1.25);
    std::vector<double> loads(plan.loads.size(), 0.0);
    for (std::size_t m = 0; m < matrices.size(); ++m)
      loads[static_cast<std::size_t>(plan.roots[m])] += matrices[m].cost;
    for (std::size_t c = 0; c < loads.size(); ++c) EXPECT_NEAR(plan.loads[c], loads[c], 1e-6 * loads[c]);
    const double limit = 1.25 * bound_of(matrices, ranks * replicas);
    if (largest(with(kAllStay)) <= limit) {
      EXPECT_EQ(plan, with(kAllStay));
      ++stayed;
    } else {
      EXPECT_LE(largest(plan), std::max(limit, largest(with(0.0))));
      ++moved;
    }
  }
  EXPECT_GT(stayed, 50);
  EXPECT_GT(moved, 50);
}

// --- balance over models ---

bool is_muons(const InventoryTensor& tensor) {
  return tensor.shape.size() >= 2 && tensor.kind != "vector" && tensor.kind != "embedding" && tensor.role != "head" &&
      tensor.role != "router" && tensor.role != "expert_bias" && tensor.role != "pos_embed";
}

// What layers are cut at: every rank holds an equal run of a layer, its borders rounded up to a row, or to a matrix, as
// in a bucket of one uniform segment without padding.
enum class Cut { kRows, kMatrices };

std::vector<Interval> even_cut(Index begin, Index numel, Index atom, Index bucket_numel, int world_size) {
  std::vector<Interval> held;
  const Index shard = ceil_div(bucket_numel, world_size);
  const auto border = [&](int rank) {
    const Index flat = std::clamp<Index>(rank * shard - begin, 0, numel);
    return round_up(flat, atom) > numel ? numel : round_up(flat, atom);
  };
  for (int r = 0; r < world_size; ++r) held.push_back({border(r), r + 1 == world_size ? numel : border(r + 1)});
  return held;
}

std::vector<RootMatrix> matrices_of(const Inventory& model, int world_size, Cut cut = Cut::kRows) {
  std::vector<RootMatrix> matrices;
  int bucket = 0;
  for (const InventoryUnit& unit : model.units) {
    Index begin = 0;
    const Index bucket_numel = unit.numel();
    for (const InventoryTensor& tensor : unit.tensors) {
      const Index numel = tensor.numel();
      if (is_muons(tensor)) {
        const Index cols = tensor.shape.back();
        const Index rows = tensor.shape[tensor.shape.size() - 2];
        const auto held = even_cut(begin, numel, cut == Cut::kRows ? cols : rows * cols, bucket_numel, world_size);
        for (Index start = 0; start < numel; start += rows * cols) {
          matrices.push_back(
              {.cost = newton_schulz_cost(rows, cols, 5),
               .numel = rows * cols,
               .bucket = bucket,
               .pieces = pieces_of(held, {start, start + rows * cols})});
        }
      }
      begin += numel;
    }
    ++bucket;
  }
  return matrices;
}

int num_buckets_with_cut(const std::vector<RootMatrix>& matrices) {
  std::set<int> buckets;
  for (const RootMatrix& matrix : matrices) {
    if (sole_holder(matrix.pieces, matrix.numel) < 0) buckets.insert(matrix.bucket);
  }
  return static_cast<int>(buckets.size());
}

// Of the same layouts, all whole matrices staying: up to 2.4 times the bound with rows, 68 with matrices.
TEST(MatrixRoots, load_is_balanced_over_the_bundled_models) {
  int num_models = 0;
  int moving_of_matrices = 0;
  int all_of_matrices = 0;
  for (const auto& entry : std::filesystem::directory_iterator(RAGGED_MODELS_DIR)) {
    if (entry.path().extension() != ".json") continue;
    const Inventory model = bundled_model(entry.path().stem().string());
    ++num_models;
    for (const int world_size : {8, 16, 32, 64, 128, 256}) {
      for (const Cut cut : {Cut::kRows, Cut::kMatrices}) {
        if (cut == Cut::kMatrices && world_size != 8 && world_size != 64) continue;
        SCOPED_TRACE(fmt::format("{} at {} ranks, whole matrices {}", model.name, world_size, cut == Cut::kMatrices));
        const auto matrices = matrices_of(model, world_size, cut);
        const RootPlan plan = assign_roots(matrices, {.world_size = world_size});
        EXPECT_LE(largest(plan), 1.25 * bound_of(matrices, world_size));
        if (cut == Cut::kRows) {
          EXPECT_EQ(plan.num_moving_buckets, num_buckets_with_cut(matrices));  // no other has to
        } else {
          moving_of_matrices += plan.num_moving_buckets;
          all_of_matrices += static_cast<int>(model.units.size());
        }
      }
    }
  }
  EXPECT_EQ(num_models, 20);
  // Whole matrices everywhere: layouts that would communicate nothing, were they balanced.
  EXPECT_LT(moving_of_matrices, all_of_matrices / 3);
}

// Attention costs three times as much an element as the experts behind it, and at 32 ranks one rank holds all of it.
TEST(MatrixRoots, costly_neighbours_leave_an_overloaded_rank) {
  const auto matrices = matrices_of(bundled_model("qwen3-30b-a3b-perexpert"), 32);
  const double bound = bound_of(matrices, 32);
  const RootPlan all_stay = assign_roots(matrices, {.world_size = 32, .local_limit = kAllStay});
  const RootPlan plan = assign_roots(matrices, {.world_size = 32});
  EXPECT_GT(largest(all_stay), 2.0 * bound);
  EXPECT_LE(largest(plan), 1.25 * bound);
  EXPECT_EQ(plan.num_moving_buckets, all_stay.num_moving_buckets);
  // What moves for it is little.
  Index all = 0;
  for (const RootMatrix& matrix : matrices) all += matrix.numel;
  EXPECT_LT(plan.moved_numel - all_stay.moved_numel, all / 20);
}

}  // namespace
}  // namespace ragged::plan
