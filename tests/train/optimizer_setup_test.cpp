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

TEST(OptimizerSetup, momenta_in_8_bits_need_tiles_too) {
  Config config = config_of("muon");
  config.optimizer.momentum_format = "power";
  config.optimizer.rules = {{.match = "k_proj", .state_format = "bf16"}};
  const auto model = make_model(config.model, parameters_on(c10::kMeta));
  const ParamChoices choices = resolve_optimizers(config, *model);
  const fsdp::ShardPolicy of_layer = shard_policy(config, choices, "layers.1.");
  EXPECT_EQ(of_layer({.name = "self_attn.q_proj.weight", .shape = {256, 256}}), plan::rows(32));
  EXPECT_FALSE(of_layer({.name = "self_attn.k_proj.weight", .shape = {128, 256}}));
  EXPECT_FALSE(of_layer({.name = "input_layernorm.weight", .shape = {256}}));
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

TEST(OptimizerSetup, choices_of_the_config_are_those_that_there_are) {
  const auto choices = [](std::string_view key) {
    const auto views = find_config_key(key)->choices;
    return std::vector<std::string>(views.begin(), views.end());
  };
  EXPECT_EQ(choices("optimizer.newton_schulz"), optim::newton_schulz_names());
  for (const std::string& scale : choices("optimizer.scale")) {
    EXPECT_EQ(optim::to_string(optim::muon_scale(scale)), scale);
  }
  const auto kinds = optim::optimizer_kinds();
  EXPECT_EQ(choices("optimizer.kind"), std::vector<std::string>(kinds.begin(), kinds.end()));
}

TEST(OptimizerSetup, settings_reach_each_optimizer) {
  Config config = config_of("muon");
  config.train.lr = 0.25;
  config.optimizer.betas = {0.5, 0.75};
  config.optimizer.eps = 1e-3;
  config.optimizer.weight_decay = 0.5;
  config.optimizer.moment_dtype = "bf16";
  config.optimizer.tile_format = "dynamic";
  config.optimizer.momentum_format = "bf16";
  config.optimizer.momentum = 0.125;
  config.optimizer.nesterov = false;
  config.optimizer.scale = "original";
  config.optimizer.newton_schulz = "you";
  config.optimizer.replicas = "share";
  config.optimizer.normuon = true;
  config.optimizer.row_beta2 = 0.375;
  config.optimizer.precondition_frequency = 3;
  config.optimizer.max_precondition_dim = 77;
  config.optimizer.wire_dtype = "bf16";
  config.optimizer.rules = {{.match = "x"}};
  const optim::OptimizerSpec spec = optimizer_spec(config);
  EXPECT_EQ(spec.kind, "muon");
  EXPECT_EQ(spec.rules, config.optimizer.rules);
  EXPECT_EQ(spec.lr, 0.25);
  EXPECT_EQ(spec.adamw.beta1, 0.5);
  EXPECT_EQ(spec.adamw.beta2, 0.75);
  EXPECT_EQ(spec.adamw.eps, 1e-3);
  EXPECT_EQ(spec.adamw.weight_decay, 0.5);
  EXPECT_EQ(spec.adamw.moment_dtype, at::kBFloat16);
  EXPECT_EQ(spec.adamw8bit.beta1, 0.5);
  EXPECT_EQ(spec.adamw8bit.beta2, 0.75);
  EXPECT_EQ(spec.adamw8bit.eps, 1e-3);
  EXPECT_EQ(spec.adamw8bit.weight_decay, 0.5);
  EXPECT_EQ(spec.adamw8bit.state_format, "dynamic");
  EXPECT_EQ(spec.muon.weight_decay, 0.5);
  EXPECT_EQ(spec.muon.momentum_format, "bf16");
  EXPECT_EQ(spec.muon.math.momentum, 0.125);
  EXPECT_FALSE(spec.muon.math.nesterov);
  EXPECT_EQ(spec.muon.math.scale, optim::MuonScale::kOriginal);
  EXPECT_EQ(spec.muon.math.newton_schulz.coefficients, "you");
  EXPECT_EQ(spec.muon.movement.replicas, optim::MuonReplicas::kShare);
  EXPECT_TRUE(spec.muon.math.normuon);
  EXPECT_EQ(spec.muon.math.row_beta2, 0.375);
  EXPECT_EQ(spec.soap.weight_decay, 0.5);
  EXPECT_EQ(spec.soap.math.beta1, 0.5);
  EXPECT_EQ(spec.soap.math.beta2, 0.75);
  EXPECT_EQ(spec.soap.math.eps, 1e-3);
  EXPECT_EQ(spec.soap.math.precondition_frequency, 3);
  EXPECT_EQ(spec.soap.math.max_precondition_dim, 77);
  EXPECT_EQ(spec.soap.math.wire_dtype, at::kBFloat16);
}

TEST(OptimizerSetup, default_rules_are_told) {
  EXPECT_NE(default_rules_text("muon").find("match '(^|\\.)(router|gate)\\.': kind adamw"), std::string::npos);
}

}  // namespace
}  // namespace ragged::train
