// Roots of matrices: numbers worked out by hand, and balance over the bundled models.
#include "ragged/plan/matrix_roots.h"

#include <filesystem>
#include <numeric>

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

// --- balance over models ---

bool is_muons(const InventoryTensor& tensor) {
  return tensor.shape.size() >= 2 && tensor.kind != "vector" && tensor.kind != "embedding" && tensor.role != "head" &&
      tensor.role != "router" && tensor.role != "expert_bias" && tensor.role != "pos_embed";
}

// Every rank holds an equal run of a layer's rows, as in a bucket of one uniform segment without padding.
std::vector<Interval> even_cut(Index begin, Index numel, Index row, Index bucket_numel, int world_size) {
  std::vector<Interval> held;
  const Index shard = ceil_div(bucket_numel, world_size);
  const auto border = [&](int rank) {
    const Index flat = std::clamp<Index>(rank * shard - begin, 0, numel);
    return round_up(flat, row) > numel ? numel : round_up(flat, row);
  };
  for (int r = 0; r < world_size; ++r) held.push_back({border(r), r + 1 == world_size ? numel : border(r + 1)});
  return held;
}

std::vector<RootMatrix> matrices_of(const Inventory& model, int world_size) {
  std::vector<RootMatrix> matrices;
  int bucket = 0;
  for (const InventoryUnit& unit : model.units) {
    Index begin = 0;
    for (const InventoryTensor& tensor : unit.tensors) {
      const Index numel = tensor.numel();
      if (is_muons(tensor)) {
        const Index cols = tensor.shape.back();
        const Index rows = tensor.shape[tensor.shape.size() - 2];
        const auto held = even_cut(begin, numel, cols, unit.numel(), world_size);
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

struct Balance {
  double reached = 0.0;  // largest load over mean
  double bound = 0.0;    // no assignment of whole matrices is below
};

Balance balance_of(const std::vector<RootMatrix>& matrices, const RootOptions& options) {
  const RootPlan plan = assign_roots(matrices, options);
  const double mean = std::accumulate(plan.loads.begin(), plan.loads.end(), 0.0) / options.world_size;
  std::vector<double> costs(static_cast<std::size_t>(options.world_size) + 1, 0.0);  // at least W + 1 of them
  for (const RootMatrix& matrix : matrices) costs.push_back(matrix.cost);
  std::sort(costs.rbegin(), costs.rend());
  // Of W + 1 matrices two share a rank: no less than the two smallest.
  const auto last = static_cast<std::size_t>(options.world_size);
  const double pair = costs[last - 1] + costs[last];
  return {
      *std::max_element(plan.loads.begin(), plan.loads.end()) / mean, std::max({1.0, costs[0] / mean, pair / mean})};
}

TEST(MatrixRoots, load_is_balanced_over_the_bundled_models) {
  int num_models = 0;
  for (const auto& entry : std::filesystem::directory_iterator(RAGGED_MODELS_DIR)) {
    if (entry.path().extension() != ".json") continue;
    const Inventory model = bundled_model(entry.path().stem().string());
    ++num_models;
    for (const int world_size : {8, 16, 32, 64, 128, 256}) {
      SCOPED_TRACE(fmt::format("{} at {} ranks", model.name, world_size));
      const auto matrices = matrices_of(model, world_size);
      const Balance balance = balance_of(matrices, {.world_size = world_size});
      EXPECT_LE(balance.reached, 1.3 * balance.bound);
    }
  }
  EXPECT_EQ(num_models, 20);
}

// Attention costs three times as much an element as the experts behind it, and at 32 ranks one rank holds all of it.
TEST(MatrixRoots, costly_neighbours_leave_an_overloaded_rank) {
  const auto matrices = matrices_of(bundled_model("qwen3-30b-a3b-perexpert"), 32);
  const double all_stay =
      balance_of(matrices, {.world_size = 32, .local_limit = std::numeric_limits<double>::infinity()}).reached;
  EXPECT_GT(all_stay, 2.0);
  EXPECT_LE(balance_of(matrices, {.world_size = 32}).reached, 1.25);
  // What moves for it is little.
  const auto moved = [&](double limit) {
    return assign_roots(matrices, {.world_size = 32, .local_limit = limit}).moved_numel;
  };
  Index all = 0;
  for (const RootMatrix& matrix : matrices) all += matrix.numel;
  EXPECT_LT(moved(1.25) - moved(std::numeric_limits<double>::infinity()), all / 20);
}

}  // namespace
}  // namespace ragged::plan
