#include "ragged/optim/param_rules.h"

#include <gtest/gtest.h>

#include "ragged/base/error.h"

namespace ragged::optim {
namespace {

const std::vector<ParamFacts> kParams{
    {"embed_tokens.weight", {256, 24}},
    {"layers.0.input_layernorm.weight", {24}},
    {"layers.0.self_attn.q_proj.weight", {24, 24}},
    {"layers.0.mlp.router.weight", {5, 24}},
    {"layers.0.mlp.router.bias", {5}},
    {"layers.0.mlp.gate_proj.weight", {20, 24}},
    {"layers.0.mlp.experts.gate_up_proj", {5, 20, 24}},
    {"layers.0.mlp.experts.gate_up_proj_bias", {5, 20}},
    {"layers.10.self_attn.q_proj.weight", {24, 24}},
    {"norm.weight", {24}},
    {"lm_head.weight", {256, 24}},
};

std::vector<std::string> kinds(std::string_view kind, const std::vector<ParamRule>& rules = {}) {
  std::vector<std::string> result;
  for (const ParamChoice& choice : resolve(kind, rules, kParams)) result.push_back(choice.kind);
  return result;
}

std::string message(std::string_view kind, const std::vector<ParamRule>& rules) {
  try {
    resolve(kind, rules, kParams);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

void expect_in(const std::string& text, std::initializer_list<std::string_view> fragments) {
  for (std::string_view fragment : fragments) {
    EXPECT_NE(text.find(fragment), std::string::npos) << "'" << fragment << "' in: " << text;
  }
}

TEST(ParamRules, muon_and_soap_take_hidden_matrices_and_stacks_of_experts) {
  for (const std::string kind : {"muon", "soap"}) {
    const std::vector<std::string> expected{"adamw", "adamw", kind, "adamw", "adamw", kind,
                                            kind,    "adamw", kind, "adamw", "adamw"};
    EXPECT_EQ(kinds(kind), expected);
  }
}

TEST(ParamRules, elementwise_optimizers_take_all) {
  for (const char* kind : {"adamw", "adamw8bit"}) {
    EXPECT_EQ(kinds(kind), std::vector<std::string>(kParams.size(), kind));
  }
}

TEST(ParamRules, eight_bit_states_leave_biases_alone) {
  const auto choices = resolve("adamw8bit", {}, kParams);
  EXPECT_EQ(choices[7].state_format, "fp32");
  EXPECT_FALSE(choices[2].state_format);
}

TEST(ParamRules, biases_do_not_decay_whatever_their_dims) {
  for (const std::string_view kind : optimizer_kinds()) {
    const auto choices = resolve(kind, {}, kParams);
    EXPECT_EQ(choices[4].weight_decay, 0.0);
    EXPECT_EQ(choices[7].weight_decay, 0.0);
    EXPECT_FALSE(choices[2].weight_decay);
  }
}

TEST(ParamRules, later_rules_win_in_what_they_say) {
  const auto choices = resolve(
      "adamw",
      std::vector<ParamRule>{
          {.match = "q_proj", .kind = "muon", .lr_scale = 0.5, .weight_decay = 0.25},
          {.match = "^layers\\.0\\.", .weight_decay = 0.0},
          {.match = "q_proj", .lr_scale = 2.0}},
      kParams);
  EXPECT_EQ(choices[2], (ParamChoice{.kind = "muon", .lr_scale = 2.0, .weight_decay = 0.0}));
  EXPECT_EQ(choices[8], (ParamChoice{.kind = "muon", .lr_scale = 2.0, .weight_decay = 0.25}));
  EXPECT_EQ(choices[9], (ParamChoice{.kind = "adamw"}));
  EXPECT_EQ(choices[1], (ParamChoice{.kind = "adamw", .weight_decay = 0.0}));
}

TEST(ParamRules, rules_of_the_user_overrule_the_default_ones) {
  EXPECT_EQ(kinds("muon", {{.match = "lm_head|router\\.weight", .kind = "muon"}})[10], "muon");
  EXPECT_EQ(kinds("muon", {{.match = "lm_head|router\\.weight", .kind = "muon"}})[3], "muon");
  EXPECT_EQ(kinds("muon", {{.match = "", .kind = "adamw8bit"}}), kinds("adamw8bit"));
}

TEST(ParamRules, max_dims_narrows_a_rule) {
  const auto choices = resolve("adamw", std::vector<ParamRule>{{.match = "", .lr_scale = 3.0, .max_dims = 1}}, kParams);
  for (std::size_t i = 0; i < kParams.size(); ++i) {
    EXPECT_EQ(choices[i].lr_scale, kParams[i].shape.size() == 1 ? 3.0 : 1.0) << kParams[i].name;
  }
  expect_in(message("adamw", {{.match = "q_proj", .max_dims = 1}}), {"q_proj", "matches none"});
}

TEST(ParamRules, rule_that_matches_nothing_is_an_error_that_names_the_nearest_parameter) {
  expect_in(
      message("adamw", {{.match = "norm"}, {.match = "layers.0.mlp.gate_prj.weight", .kind = "muon"}}),
      {"'layers.0.mlp.gate_prj.weight'", "matches none of 11", "rule 2 of 2", "'layers.0.mlp.gate_proj.weight'"});
}

TEST(ParamRules, default_rule_may_match_nothing) {
  EXPECT_NO_THROW(resolve("muon", {}, std::vector<ParamFacts>{{"q.weight", {4, 4}}}));
  EXPECT_TRUE(resolve("muon", {}, {}).empty());
}

TEST(ParamRules, bad_regular_expression_says_what_to_write) {
  expect_in(message("adamw", {{.match = "layers[", .kind = "muon"}}), {"'layers['", "rule 1 of 1", "TOML"});
  EXPECT_THROW(check_rule({.match = "(("}, "optimizer.rules[0]"), InvalidArgument);
}

TEST(ParamRules, unknown_kind_suggests_the_nearest) {
  expect_in(message("adamw", {{.match = "norm", .kind = "moun"}}), {"'moun'", "rule 1 of 1", "'muon'?"});
  expect_in(message("lion", {}), {"'lion'", "adamw, adamw8bit, muon, soap"});
}

TEST(ParamRules, vector_sent_to_muon_is_named_with_a_remedy) {
  expect_in(
      message("muon", {{.match = "norm", .kind = "muon"}}),
      {"layers.0.input_layernorm.weight", "[24]", "muon", "kind = \"adamw\""});
}

TEST(ParamRules, splits_fit_the_rows_of_a_matrix_and_go_to_matrix_optimizers) {
  const auto splits = [](std::string match, std::vector<Index> rows) {
    return std::vector<ParamRule>{{.match = std::move(match), .splits = std::move(rows)}};
  };
  EXPECT_EQ(resolve("muon", splits("gate_up_proj$", {10, 10}), kParams)[6].splits, (std::vector<Index>{10, 10}));
  EXPECT_EQ(resolve("muon", splits("q_proj", {8, 16}), kParams)[2].splits, (std::vector<Index>{8, 16}));
  expect_in(message("muon", splits("q_proj", {8, 15})), {"24 rows", "[8, 15]", "23", "q_proj"});
  expect_in(message("adamw", splits("q_proj", {8, 16})), {"of muon", "adamw", "q_proj"});
  expect_in(message("muon", splits("q_proj", {0, 24})), {"1 row", "0"});
}

TEST(ParamRules, numbers_out_of_range_name_the_rule) {
  expect_in(message("adamw", {{.match = "norm", .lr_scale = -1.0}}), {"lr_scale >= 0", "-1", "rule 1 of 1"});
  expect_in(message("adamw", {{.match = "norm", .weight_decay = -0.5}}), {"weight_decay >= 0", "-0.5"});
  expect_in(message("adamw", {{.match = "norm", .max_dims = 0}}), {"max_dims >= 1", "0"});
}

TEST(ParamRules, rules_read_well) {
  EXPECT_EQ(
      to_string(ParamRule{.match = "norm", .kind = "adamw", .weight_decay = 0.0}),
      "match 'norm': kind adamw, weight_decay 0");
  EXPECT_EQ(
      to_string(ParamRule{.match = "", .kind = "adamw", .max_dims = 1}), "match '' of at most 1 dims: kind adamw");
  EXPECT_EQ(to_string(ParamRule{.match = "x", .splits = std::vector<Index>{1, 2}}), "match 'x': splits [1, 2]");
}

}  // namespace
}  // namespace ragged::optim
