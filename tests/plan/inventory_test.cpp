#include "ragged/plan/inventory.h"

#include <filesystem>
#include <fstream>
#include <iterator>

#include "ragged/plan/planner.h"
#include "tests/plan/plans.h"
#include "tests/support/expect_error.h"

namespace ragged::plan {
namespace {

using ::ragged::testing::bundled_model;

constexpr const char* kSmall = R"({"format": 1, "name": "small", "dtype": "bfloat16", "total_params": 104, "units": [
  {"name": "embed", "params": [{"name": "e.weight", "shape": [5, 4], "kind": "embedding"}]},
  {"name": "layers.*", "prefix": "layers.*.", "first": 2, "count": 3, "params": [
    {"name": "norm", "shape": [4], "kind": "vector", "dtype": "float32"},
    {"repeat": 2, "params": [{"name": "experts.#.w", "shape": [3, 4], "kind": "matrix", "role": "expert"}]}]},
  {"name": "extra", "optional": "mtp", "params": [{"name": "x", "shape": [1]}]}]})";

std::string with(std::string from, std::string to) {
  std::string text = kSmall;
  return text.replace(text.find(from), from.size(), to);
}

TEST(Inventory, expands_units_and_repeats) {
  const Inventory small = inventory_from_json(kSmall);
  EXPECT_EQ(small.name, "small");
  ASSERT_EQ(small.units.size(), 4u);
  EXPECT_EQ(small.numel(), 104);
  EXPECT_EQ(small.units[1].name, "layers.2");
  EXPECT_EQ(small.units[3].kind, "layers.2-4");
  EXPECT_TRUE(small.units[3].is_layer);
  EXPECT_FALSE(small.units[0].is_layer);
  ASSERT_EQ(small.units[3].tensors.size(), 3u);
  EXPECT_EQ(small.units[3].tensors[2].name, "layers.4.experts.1.w");
  EXPECT_EQ(small.units[3].tensors[0].dtype, "float32");
  EXPECT_EQ(small.units[3].tensors[2].dtype, "bfloat16");
  EXPECT_EQ(inventory_from_json(kSmall, {.with_optional = true}).numel(), 105);
}

TEST(Inventory, merges_layers_of_one_kind) {
  const Inventory merged = merge_layers(inventory_from_json(kSmall), 2);
  ASSERT_EQ(merged.units.size(), 3u);
  EXPECT_EQ(merged.units[1].name, "layers.2+layers.3");
  EXPECT_EQ(merged.units[2].tensors.size(), 3u);
  EXPECT_EQ(merged.numel(), 104);
  EXPECT_INVALID(merge_layers(merged, 0), "at least 1 layer");
}

TEST(Inventory, turns_rows_into_blocks) {
  const InventoryUnit unit{
      .tensors = {
          {.name = "m", .shape = {5, 4}, .kind = "matrix"},
          {.name = "v", .shape = {4}, .kind = "vector"},
          {.name = "bias", .shape = {3, 4}, .kind = "expert_fused"},
          {.name = "experts", .shape = {3, 10, 4}, .kind = "expert_fused"},
          {.name = "empty", .shape = {0, 4}, .kind = "matrix"}}};
  const std::vector<ParamSpec> specs = param_specs(unit, {.rows = 8});
  EXPECT_EQ(specs[0].block, 20);
  EXPECT_EQ(specs[1].block, 1);
  EXPECT_EQ(specs[2].block, 4);
  EXPECT_EQ(specs[3].block, 32);
  EXPECT_EQ(specs[3].restart, 40);
  EXPECT_EQ(specs[4].block, 1);
  EXPECT_EQ(param_specs(unit, {.rows = 8, .flat = true})[3].restart, 0);
  EXPECT_INVALID(param_specs(unit, {.rows = 0}), "at least 1 row");
}

TEST(Inventory, refuses_what_is_not_one) {
  EXPECT_INVALID(inventory_from_json("{"), "[inventory] Expected JSON");
  EXPECT_INVALID(inventory_from_json("[]"), "Expected an object at inventory");
  EXPECT_INVALID(inventory_from_json(std::string(100, '[')), "levels of nesting");
  EXPECT_INVALID(inventory_from_json(with("\"format\": 1", "\"format\": 2")), "format 1, but got 2");
  EXPECT_INVALID(inventory_from_json(with("[5, 4]", "[5, -4]")), "inventory.units[0].params[0].shape[1], but got -4");
  EXPECT_INVALID(inventory_from_json(with("[5, 4]", "[4611686018427387904, 4]")), "(param 'e.weight'");
  EXPECT_INVALID(inventory_from_json(with("[5, 4]", "[6, 4]")), "the stated 104 parameters, but got 108");
  EXPECT_INVALID(inventory_from_json(with("experts.#.w", "experts.w")), "'layers.2.experts.w' twice");
  EXPECT_INVALID(inventory_from_json(with("\"layers.*\"", "\"layers\"")), "Expected a '*'");
  EXPECT_INVALID(inventory_from_json(with("\"prefix\": \"layers.*.\"", "\"prefix\": \"\"")), "'norm' twice");
  EXPECT_INVALID(inventory_from_json(with("\"repeat\": 2", "\"repeat\": 4194304000")), "from 0 to 4194304");
  EXPECT_INVALID(inventory_from_json(with("\"count\": 3", "\"count\": 4000000")), "Expected at most 4194304 tensors");
}

TEST(Inventory, reads_every_bundled_model) {
  int num_models = 0;
  for (const auto& entry : std::filesystem::directory_iterator(RAGGED_MODELS_DIR)) {
    if (entry.path().extension() != ".json") continue;
    SCOPED_TRACE(entry.path().string());
    const Inventory inventory = bundled_model(entry.path().stem().string());
    EXPECT_EQ(inventory.name, entry.path().stem().string());
    for (const InventoryUnit& unit : inventory.units) EXPECT_NO_THROW(param_specs(unit, {.rows = 128}));
    ++num_models;
  }
  EXPECT_EQ(num_models, 20);
}

}  // namespace
}  // namespace ragged::plan
