// What a config's optimizer comes to for the reference models.
#include "ragged/train/optimizer_setup.h"

#include <gtest/gtest.h>

#include "ragged/optim/adamw8bit.h"
#include "ragged/train/config_keys.h"

namespace ragged::train {
namespace {

Config config_of(std::string_view kind, std::string_view model = "llama") {
  Config config;
  config.model.kind = model;
  config.model.layers = 2;
  config.optimizer.kind = kind;
  return config;
}

// "kind: names of layer 0 and of the root", a line a kind.
std::string routing(const Config& config) {
  const auto model = make_model(config.model, parameters_on(c10::kMeta));
  std::map<std::string, std::string> by_kind;
  const ParamChoices choices = resolve_optimizers(config, *model);
  for (const auto& parameter : model->named_parameters()) {
    if (parameter.key().starts_with("layers.1.")) continue;
    by_kind[choices.at(parameter.key()).kind] += " " + parameter.key();
  }
  std::string text;
  for (const auto& [kind, names] : by_kind) text += kind + ":" + names + "\n";
  return text;
}

TEST(OptimizerSetup, muon_takes_the_hidden_matrices_of_a_llama) {
  EXPECT_EQ(
      routing(config_of("muon")),
      "adamw: embed_tokens.weight layers.0.input_layernorm.weight layers.0.post_attention_layernorm.weight "
      "norm.weight lm_head.weight\n"
      "muon: layers.0.self_attn.q_proj.weight layers.0.self_attn.k_proj.weight layers.0.self_attn.v_proj.weight "
      "layers.0.self_attn.o_proj.weight layers.0.mlp.gate_proj.weight layers.0.mlp.up_proj.weight "
      "layers.0.mlp.down_proj.weight\n");
}

TEST(OptimizerSetup, muon_takes_stacked_experts_and_neither_router_nor_biases) {
  EXPECT_EQ(
      routing(config_of("muon", "moe")),
      "adamw: embed_tokens.weight layers.0.input_layernorm.weight layers.0.post_attention_layernorm.weight "
      "layers.0.mlp.router.weight layers.0.mlp.router.bias layers.0.mlp.experts.gate_up_proj_bias "
      "layers.0.mlp.experts.down_proj_bias norm.weight lm_head.weight\n"
      "muon: layers.0.self_attn.q_proj.weight layers.0.self_attn.k_proj.weight layers.0.self_attn.v_proj.weight "
      "layers.0.self_attn.o_proj.weight layers.0.mlp.experts.gate_up_proj layers.0.mlp.experts.down_proj\n");
}

TEST(OptimizerSetup, wrong_rules_are_refused_from_the_config_alone) {
  Config config = config_of("adamw");
  config.optimizer.rules = {{.match = "self_atn", .kind = "muon"}};
  EXPECT_THROW(check_optimizer_rules(config), InvalidArgument);
  config.optimizer.rules = {{.match = "self_attn", .kind = "muon"}};
  EXPECT_NO_THROW(check_optimizer_rules(config));
}

TEST(OptimizerSetup, blocks_follow_from_states) {
  Config config = config_of("adamw8bit", "moe");
  config.optimizer.rules = {{.match = "q_proj", .kind = "adamw"}, {.match = "k_proj", .state_format = "fp32"}};
  const auto model = make_model(config.model, parameters_on(c10::kMeta));
  const ParamChoices choices = resolve_optimizers(config, *model);
  const fsdp::ShardPolicy of_root = shard_policy(config, choices, "");
  const fsdp::ShardPolicy of_layer = shard_policy(config, choices, "layers.1.");
  EXPECT_FALSE(of_layer({.name = "self_attn.q_proj.weight", .shape = {256, 256}}));
  EXPECT_FALSE(of_layer({.name = "self_attn.k_proj.weight", .shape = {128, 256}}));
  EXPECT_EQ(of_layer({.name = "self_attn.o_proj.weight", .shape = {256, 256}}), plan::rows(32));
  EXPECT_EQ(of_layer({.name = "mlp.experts.down_proj", .shape = {8, 256, 688}}), plan::rows(32));
  EXPECT_FALSE(of_layer({.name = "mlp.experts.down_proj_bias", .shape = {8, 256}}));
  EXPECT_FALSE(of_layer({.name = "input_layernorm.weight", .shape = {256}}));
  EXPECT_FALSE(of_root({.name = "embed_tokens.weight", .shape = {256, 256}}));

  config.parallel.rows = 4;
  const fsdp::ShardPolicy by_hand = shard_policy(config, choices, "layers.1.");
  EXPECT_EQ(by_hand({.name = "self_attn.q_proj.weight", .shape = {256, 256}}), plan::rows(4));
  EXPECT_FALSE(by_hand({.name = "input_layernorm.weight", .shape = {256}}));
}

TEST(OptimizerSetup, adamw_needs_no_blocks) {
  const Config config = config_of("adamw");
  const auto model = make_model(config.model, parameters_on(c10::kMeta));
  const ParamChoices choices = resolve_optimizers(config, *model);
  EXPECT_FALSE(shard_policy(config, choices, "layers.0.")({.name = "self_attn.q_proj.weight", .shape = {256, 256}}));
}

TEST(OptimizerSetup, table_folds_layers_that_are_alike) {
  const std::vector<optim::OptimizerRow> rows{
      {"embed.weight", {256, 24}, "adamw", "fp32", "element", 1000},
      {"layers.0.q.weight", {24, 24}, "adamw8bit", "power 32x32", "24 rows", 30},
      {"layers.0.norm", {24}, "adamw8bit", "fp32", "element", 8},
      {"layers.1.q.weight", {24, 24}, "adamw8bit", "power 32x32", "24 rows", 4},
      {"layers.10.q.weight", {24, 24}, "adamw8bit", "dynamic 32x32", "24 rows", 5},
  };
  EXPECT_EQ(
      optimizer_table(rows),
      "parameter                 shape     optimizer  states         block    bytes\n"
      "embed.weight              256 x 24  adamw      fp32           element  1,000\n"
      "layers.*.q.weight    x 2  24 x 24   adamw8bit  power 32x32    24 rows     34\n"
      "layers.*.norm             24        adamw8bit  fp32           element      8\n"
      "layers.*.q.weight         24 x 24   adamw8bit  dynamic 32x32  24 rows      5\n"
      "states on this rank                                                    1,047\n");
}

TEST(OptimizerSetup, default_rules_are_told) {
  EXPECT_NE(default_rules_text("muon").find("match '(^|\\.)(router|gate)\\.': kind adamw"), std::string::npos);
}

}  // namespace
}  // namespace ragged::train
