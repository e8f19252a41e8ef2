// Where a model's shapes come from.
#include "ragged/sim/model_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/sim/files.h"
#include "tests/support/expect_error.h"

namespace ragged::sim {
namespace {

using ::ragged::testing::safetensors_file;
using ::ragged::testing::TempFolder;

constexpr const char* kInventory = R"({"format": 1, "name": "small", "units": [
  {"name": "embed", "params": [{"name": "e.weight", "shape": [5, 4], "kind": "embedding"}]}]})";

TEST(ModelSource, bundled_models_are_found_by_name) {
  EXPECT_GE(bundled_models().size(), 20u);
  for (const BundledModel& bundled : bundled_models()) {
    const Model model = load_model(std::string(bundled.name));
    EXPECT_EQ(model.inventory.name, bundled.name);
    EXPECT_GT(model.facts.attention_width, 0) << bundled.name;
  }
  const Model oss = load_model("gpt-oss-120b-hf-fused");
  EXPECT_EQ(oss.inventory.numel(), 116'829'156'672);
  EXPECT_EQ(oss.facts, (ModelFacts{.experts = 128, .experts_per_token = 4, .attention_width = 4096}));
}

TEST(ModelSource, an_unknown_name_suggests_the_nearest) {
  EXPECT_INVALID(load_model("lama-3-8b"), "Did you mean 'llama-3-8b'?");
  EXPECT_INVALID(load_model("gpt-oss-120b"), "Did you mean 'gpt-oss-120b-fused'?");
  EXPECT_INVALID(load_model("gpt-oss-120b"), "Bundled: deepseek-v3-671b-fused");
  EXPECT_INVALID(load_model(""), "Expected a bundled model or a file");
}

TEST(ModelSource, inventory_files_are_read_and_named) {
  const TempFolder folder;
  folder.write("small.json", kInventory);
  EXPECT_EQ(load_model(folder.path("small.json").string()).inventory.numel(), 20);
  folder.write("bad.json", R"({"format": 1, "units": [{"name": "x", "params": [{"name": "a", "shape": [-1]}]}]})");
  EXPECT_INVALID(load_model(folder.path("bad.json").string()), "bad.json");
  EXPECT_INVALID(load_model(folder.path("no.json").string()), "no.json");
}

TEST(ModelSource, units_come_from_the_names_of_stored_tensors) {
  std::vector<StoredTensor> tensors = {
      {"lm_head.weight", "BF16", {10, 4}},
      {"model.norm.weight", "BF16", {4}},
      {"model.embed_tokens.weight", "BF16", {10, 4}}};
  for (const int layer : {10, 0, 2, 1, 9}) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    tensors.push_back({prefix + "mlp.experts.10.w.weight", "BF16", {2, 4}});
    tensors.push_back({prefix + "mlp.experts.9.w.weight", "BF16", {2, 4}});
    tensors.push_back({prefix + "self_attn.q_proj.weight", "BF16", {layer == 0 ? 8 : 4, 4}});
  }
  const Model model = model_from_tensors("m", tensors);
  ASSERT_EQ(model.inventory.units.size(), 7u);
  EXPECT_EQ(model.inventory.units[0].name, "embed");
  EXPECT_EQ(model.inventory.units[1].kind, "model.layers.0");
  EXPECT_EQ(model.inventory.units[4].name, "model.layers.9");
  EXPECT_EQ(model.inventory.units[5].kind, "model.layers.1-10");
  EXPECT_EQ(model.inventory.units[5].tensors[0].name, "model.layers.10.mlp.experts.9.w.weight");
  EXPECT_EQ(model.inventory.units[5].tensors[0].role, "expert");
  EXPECT_EQ(model.inventory.units[6].name, "norm_head");
  EXPECT_EQ(model.inventory.numel(), 40 + 4 + 40 + 5 * 16 + 4 * 16 + 32);
  EXPECT_TRUE(model.remarks.empty());
}

TEST(ModelSource, stacked_experts_and_packed_types_are_noticed) {
  const Model model = model_from_tensors(
      "m",
      std::vector<StoredTensor>{
          {"l.0.mlp.experts.down", "BF16", {8, 2, 4}},
          {"l.0.mlp.experts.down_bias", "BF16", {8, 4}},
          {"l.0.mlp.w", "F8_E4M3", {8, 4}}});
  EXPECT_EQ(model.inventory.units[0].tensors[0].kind, "expert_fused");
  EXPECT_EQ(model.inventory.units[0].tensors[1].kind, "expert_fused");
  ASSERT_EQ(model.remarks.size(), 1u);
  EXPECT_THAT(model.remarks[0], ::testing::HasSubstr("1 tensors"));
}

TEST(ModelSource, a_folder_of_weights_will_do) {
  const TempFolder folder;
  EXPECT_INVALID(load_model(folder.path("").string()), "model.safetensors or its index");
  folder.write(
      "model.safetensors", safetensors_file(R"({"a":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]}})", 24));
  folder.write("config.json", R"({"num_attention_heads": 4, "hidden_size": 32, "num_experts_per_tok": 2})");
  const Model model = load_model(folder.path("").string());
  EXPECT_EQ(model.inventory.numel(), 6);
  EXPECT_EQ(model.facts.attention_width, 32);
  EXPECT_EQ(model.facts.experts_per_token, 2);
}

TEST(ModelSource, a_config_that_is_none_tells_nothing) {
  EXPECT_EQ(facts_from_json("{"), ModelFacts{});
  EXPECT_EQ(facts_from_json("[]"), ModelFacts{});
  EXPECT_EQ(facts_from_json(std::string(100000, '[')), ModelFacts{});
  EXPECT_EQ(facts_from_json(R"({"num_heads": -3, "experts_per_token": "two"})"), ModelFacts{});
}

TEST(ModelSource, nearest_gives_up_far_away) {
  EXPECT_EQ(nearest("xyz", std::vector<std::string>{"completely-different"}), "");
  EXPECT_EQ(nearest("mixtral", std::vector<std::string>{"mistral", "mixtral-8x7b"}), "mixtral-8x7b");
}

}  // namespace
}  // namespace ragged::sim
