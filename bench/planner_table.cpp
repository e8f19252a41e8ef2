// Padding of whole models beside what could be reached: the table that the planner was built
// against, and any model of one's own.
//   planner_table                                     the table; per group size: reached, the best
//                                                     with uniform segments alone, packing bound (%)
//   planner_table --golden                            tests/plan/golden/padding.tsv
//   planner_table MODEL ROWS flat|restart LAYERS RAGGED RANKS...
// MODEL is the name of a file in models/, or in $RAGGED_MODELS.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "ragged/plan/inventory.h"
#include "ragged/plan/planner.h"

namespace ragged::plan {
namespace {

struct Goal {
  const char* model;
  RowPolicy policy;
  int layers_per_bucket;
  Index max_ragged_blocks;
  std::vector<double> at_most;  // percent at 64, 256, 512, 1,024 ranks; negative: no goal
};

// 256 ragged blocks: the figures that a larger tail was found to reach.
const std::vector<Goal>& goals() {
  static const std::vector<Goal> rows{
      {"gpt-oss-120b-hf-fused", {1}, 1, 64, {0.001, 0.002, 0.03, 0.05}},
      {"gpt-oss-120b-hf-fused", {1}, 1, 256, {0.001, 0.002, 0.02, 0.05}},
      {"gpt-oss-120b-hf-fused", {16}, 1, 64, {0.005, 0.25, 0.62, 2.0}},
      {"gpt-oss-120b-hf-fused", {16}, 1, 256, {0.005, 0.03, 0.25, 0.3}},
      {"gpt-oss-120b-hf-fused", {128, true}, 1, 64, {0.02, 0.16, 6.0, 6.4}},
      {"gpt-oss-120b-hf-fused", {128, true}, 1, 256, {0.02, 0.16, 6.0, 6.4}},
      {"gpt-oss-120b-hf-fused", {64}, 1, 64, {-1, 0.08, 0.4, 6.4}},
      {"gpt-oss-120b-fused", {128, true}, 1, 64, {0.02, 0.37, 0.54, 6.4}},
      {"gpt-oss-120b-fused", {128, true}, 1, 256, {0.02, 0.37, 0.54, 6.4}},
      {"deepseek-v3-671b-fused", {16}, 1, 64, {0.01, 0.05, 0.05, 1.5}},
      {"deepseek-v3-671b-fused", {16}, 1, 256, {0.003, 0.03, 0.05, 1.5}},
      {"deepseek-v3-671b-fused", {128}, 1, 64, {0.02, 0.75, 1.6, 6.0}},
      {"deepseek-v3-671b-fused", {128}, 1, 256, {0.01, 0.06, 0.52, 1.7}},
      {"llama-3-70b", {16}, 1, 64, {0.02, 2.0, 2.0, 9.6}},
      {"llama-3-70b", {16}, 1, 256, {0.02, 0.07, 0.07, 9.6}},
      {"llama-3-70b", {16}, 2, 64, {-1, -1, -1, 2.0}},
      {"llama-3-70b", {16}, 4, 64, {-1, -1, -1, 0.31}},
      {"qwen3-30b-a3b-fused", {32}, 1, 64, {0.03, 1.0, 3.8, 9.1}},
      {"qwen3-30b-a3b-fused", {32}, 1, 256, {0.03, 0.06, 0.17, 0.17}},
  };
  return rows;
}

struct Reached {
  Index numel = 0;
  Index padding = 0;
  double percent = 0;
  double uniform_only = 0;
  double bound = 0;
  double largest_over_mean = 0;
  int collectives = 0;
  bool is_exact = true;
  double milliseconds = 0;
};

std::vector<std::vector<ParamSpec>> buckets_of(const Goal& goal) {
  const char* folder = std::getenv("RAGGED_MODELS");
  const std::string path = std::string(folder != nullptr ? folder : RAGGED_MODELS_DIR) + "/" + goal.model + ".json";
  std::ifstream file(path);
  RAGGED_CHECK(file.good(), "[planner_table] Expected an inventory at '{}', but got none.", path);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  std::vector<std::vector<ParamSpec>> buckets;
  for (const InventoryUnit& unit : merge_layers(inventory_from_json(text), goal.layers_per_bucket).units) {
    buckets.push_back(param_specs(unit, goal.policy));
  }
  return buckets;
}

Reached reach(const Goal& goal, const std::vector<std::vector<ParamSpec>>& buckets, int world_size) {
  const PlanOptions options{.world_size = world_size, .max_ragged_blocks = goal.max_ragged_blocks};
  Reached reached;
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<BucketPlan> plans = plan_buckets(buckets, options);
  reached.milliseconds = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();

  std::vector<PlanReport> reports;
  plan_buckets(buckets, options, &reports);
  Index uniform_only = 0;
  Index bound = 0;
  std::vector<Index> loads(static_cast<std::size_t>(world_size), 0);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const PlanReport& report = reports[i];
    reached.numel += report.numel;
    reached.padding += report.padding();
    reached.collectives += report.collectives();
    reached.is_exact = reached.is_exact && report.is_exact;
    uniform_only += report.uniform_only;
    bound += report.uniform_bound;
    for (int rank = 0; rank < world_size; ++rank) loads[static_cast<std::size_t>(rank)] += plans[i].local_numel(rank);
  }
  const auto numel = static_cast<double>(reached.numel);
  Index largest = 0;
  for (Index load : loads) largest = std::max(largest, load);
  reached.percent = 100 * static_cast<double>(reached.padding) / numel;
  reached.uniform_only = 100 * (static_cast<double>(uniform_only) / numel - 1);
  reached.bound = 100 * (static_cast<double>(bound) / numel - 1);
  reached.largest_over_mean = 100 * (static_cast<double>(largest) * world_size / numel - 1);
  return reached;
}

void print_row(const Goal& goal, const std::vector<int>& world_sizes) {
  const auto buckets = buckets_of(goal);
  std::printf(
      "%s, %lld rows%s, %d layers a bucket, %lld ragged blocks\n", goal.model, static_cast<long long>(goal.policy.rows),
      goal.policy.flat ? " flat" : "", goal.layers_per_bucket, static_cast<long long>(goal.max_ragged_blocks));
  for (std::size_t i = 0; i < world_sizes.size(); ++i) {
    const Reached r = reach(goal, buckets, world_sizes[i]);
    std::printf(
        "  %6d ranks: padding %.4f %% (uniform alone %.4f, bound %.4f%s), largest rank +%.2f %%, %d collectives, %.1f "
        "ms",
        world_sizes[i], r.percent, r.uniform_only, r.bound, r.is_exact ? "" : ", thinned out", r.largest_over_mean,
        r.collectives, r.milliseconds);
    if (i < goal.at_most.size() && goal.at_most[i] >= 0) {
      std::printf(", goal %g%s", goal.at_most[i], r.percent <= goal.at_most[i] ? "" : " MISSED");
    }
    std::printf("\n");
  }
}

const std::vector<int> kWorldSizes{64, 256, 512, 1024};

void print_golden() {
  std::printf(
      "# Padding of whole models that the planner reached: planner_table --golden. Layers as buckets, collective unit "
      "8.\n# model rows flat layers_per_bucket max_ragged_blocks ranks at_most_percent padding_elements\n");
  for (const Goal& goal : goals()) {
    const auto buckets = buckets_of(goal);
    for (std::size_t i = 0; i < kWorldSizes.size(); ++i) {
      if (goal.at_most[i] < 0) continue;
      const Reached r = reach(goal, buckets, kWorldSizes[i]);
      std::printf(
          "%s\t%lld\t%d\t%d\t%lld\t%d\t%g\t%lld\n", goal.model, static_cast<long long>(goal.policy.rows),
          goal.policy.flat ? 1 : 0, goal.layers_per_bucket, static_cast<long long>(goal.max_ragged_blocks),
          kWorldSizes[i], goal.at_most[i], static_cast<long long>(r.padding));
    }
  }
}

int run(const std::vector<std::string>& args) {
  if (args.size() == 1 && args[0] == "--golden") {
    print_golden();
  } else if (args.empty()) {
    for (const Goal& goal : goals()) print_row(goal, kWorldSizes);
  } else {
    RAGGED_CHECK(args.size() >= 6, "[planner_table] Expected MODEL ROWS flat|restart LAYERS RAGGED RANKS...");
    std::vector<int> world_sizes;
    for (std::size_t i = 5; i < args.size(); ++i) world_sizes.push_back(std::stoi(args[i]));
    const RowPolicy policy{.rows = std::stoll(args[1]), .flat = args[2] == "flat"};
    print_row({args[0].c_str(), policy, std::stoi(args[3]), std::stoll(args[4]), {}}, world_sizes);
  }
  return 0;
}

}  // namespace
}  // namespace ragged::plan

int main(int argc, char** argv) {
  try {
    return ragged::plan::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
