// Planning time and padding of the bundled models, layers as buckets, for group sizes up to 16,384:
// identical layers are planned once, the partition search included. Shapes only, so it runs on any
// machine. The paper's single-buffer search beside it at 1,024 ranks.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include "ragged/plan/inventory.h"
#include "ragged/plan/planner.h"

namespace ragged::plan {
namespace {

using Bucket = std::vector<ParamSpec>;

std::vector<Bucket> buckets_of(const std::string& path, Index rows_per_block) {
  std::ifstream file(path);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  std::vector<Bucket> buckets;
  for (const InventoryUnit& unit : inventory_from_json(text).units) {
    buckets.push_back(param_specs(unit, {.rows = rows_per_block}));
  }
  return buckets;
}

void run(benchmark::State& state, const std::string& path, Index rows_per_block, const PlanOptions& options) {
  const std::vector<Bucket> buckets = buckets_of(path, rows_per_block);
  std::vector<BucketPlan> plans;
  for (auto _ : state) {
    plans = plan_buckets(buckets, options);
    benchmark::DoNotOptimize(plans);
  }
  Index image = 0;
  Index padding = 0;
  Index lower_bound = 0;
  std::size_t segments = 0;
  for (const BucketPlan& plan : plans) {
    image += plan.image_numel();
    padding += plan.padding();
    lower_bound += plan.lower_bound;
    segments += plan.segments.size();
  }
  const auto numel = static_cast<double>(image - padding);
  state.counters["padding_percent"] = 100.0 * static_cast<double>(padding) / numel;
  state.counters["bound_percent"] = 100.0 * (static_cast<double>(lower_bound) / numel - 1);
  state.counters["segments"] = static_cast<double>(segments);
}

// Registered by hand: Google Benchmark's macros don't give names with a model in the middle.
[[maybe_unused]] const bool kRegistered = [] {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(RAGGED_MODELS_DIR)) {
    if (entry.path().extension() == ".json") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const std::filesystem::path& file : files) {
    const auto add = [&](const char* strategy, Index rows_per_block, const PlanOptions& options) {
      const std::string name =
          fmt::format("BM_{}/{}/rows:{}/world:{}", strategy, file.stem().string(), rows_per_block, options.world_size);
      benchmark::RegisterBenchmark(
          name.c_str(),
          [path = file.string(), rows_per_block, options](benchmark::State& state) {
            run(state, path, rows_per_block, options);
          })
          ->Unit(benchmark::kMillisecond);
    };
    for (Index rows_per_block : {1, 16, 128}) {
      for (int world_size : {8, 64, 1024, 16384}) add("plan", rows_per_block, {.world_size = world_size});
      add("paper", rows_per_block, {.world_size = 1024, .strategy = PlanStrategy::kPaper});
    }
  }
  return true;
}();

}  // namespace
}  // namespace ragged::plan
