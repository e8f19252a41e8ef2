// Padding of whole models, held to what was reached: tests/plan/golden/padding.tsv. `planner_table
// --golden` (bench/) writes the file anew.
#include <fstream>
#include <sstream>

#include <gtest/gtest.h>

#include "ragged/plan/planner.h"
#include "tests/plan/plans.h"

namespace ragged::plan {
namespace {

using ::ragged::testing::bundled_model;

struct Row {
  std::string model;
  RowPolicy policy;
  int layers_per_bucket = 1;
  Index max_ragged_blocks = 64;
  int world_size = 1;
  double at_most = 0;  // percent; what the planner was built to reach
  Index padding = 0;   // elements; what it reached
};

std::vector<Row> golden_rows() {
  std::ifstream file(RAGGED_GOLDEN_DIR "/padding.tsv");
  std::vector<Row> rows;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    Row row;
    std::istringstream fields(line);
    fields >> row.model >> row.policy.rows >> row.policy.flat >> row.layers_per_bucket >> row.max_ragged_blocks >>
        row.world_size >> row.at_most >> row.padding;
    EXPECT_FALSE(fields.fail()) << line;
    rows.push_back(row);
  }
  return rows;
}

TEST(Golden, padding_of_models_has_not_grown) {
  const std::vector<Row> rows = golden_rows();
  ASSERT_GT(rows.size(), 60u);
  for (const Row& row : rows) {
    SCOPED_TRACE(fmt::format(
        "{} x{}{}, {} layers a bucket, {} ragged blocks, {} ranks", row.model, row.policy.rows,
        row.policy.flat ? " flat" : "", row.layers_per_bucket, row.max_ragged_blocks, row.world_size));
    std::vector<std::vector<ParamSpec>> buckets;
    for (const InventoryUnit& unit : merge_layers(bundled_model(row.model), row.layers_per_bucket).units) {
      buckets.push_back(param_specs(unit, row.policy));
    }
    std::vector<PlanReport> reports;
    const std::vector<BucketPlan> plans =
        plan_buckets(buckets, {.world_size = row.world_size, .max_ragged_blocks = row.max_ragged_blocks}, &reports);
    Index padding = 0;
    Index numel = 0;
    for (std::size_t i = 0; i < plans.size(); ++i) {
      padding += plans[i].padding();
      numel += reports[i].numel;
      EXPECT_LE(reports[i].bound, reports[i].image) << "unit " << i;
      // All of them would take most of the time; neighbours have different owners.
      if (i < 5 || i + 2 > plans.size()) {
        EXPECT_NO_THROW(validate(plans[i])) << "unit " << i;
      }
    }
    EXPECT_LE(padding, row.padding);
    EXPECT_LE(100.0 * static_cast<double>(padding) / static_cast<double>(numel), row.at_most);
  }
}

}  // namespace
}  // namespace ragged::plan
