#include "ragged/train/config.h"

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include "ragged/train/config_keys.h"

namespace ragged::train {
namespace {

Config parse(std::string_view toml, std::vector<std::string> overrides = {}) {
  return parse_config(toml, "some/demo.toml", overrides);
}

// The message of what parse throws; empty when it doesn't.
std::string message(std::string_view toml, std::vector<std::string> overrides = {}) {
  try {
    parse(toml, std::move(overrides));
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

// A value that is allowed and isn't the default.
struct Change {
  const ConfigKey& key;
  void operator()(bool* value) const { *value = !*value; }
  void operator()(Index* value) const { *value += 1; }
  void operator()(double* value) const { *value = *value / 2 + 0.25; }
  void operator()(std::string* value) const {
    if (key.name == "checkpoint.resume") return;
    *value = key.choices.empty() ? "a \"b\"\\\n\t'c' \xc3\xa9" : std::string(key.choices.back());
  }
  template <class Value>
  void operator()(std::optional<Value>*) const {}  // of rules alone
  void operator()(std::vector<double>* values) const { *values = {0.125, 1.0 / 3.0}; }
  void operator()(std::vector<std::string>* values) const { *values = {".md", "\".txt"}; }
};

TEST(Config, empty_text_gives_the_defaults_and_a_run_folder_named_after_the_file) {
  const Config config = parse("");
  EXPECT_EQ(config.train.steps, TrainConfig().steps);
  EXPECT_EQ(config.run.dir, "runs/demo");
}

TEST(Config, every_key_survives_writing_and_reading) {
  for (const ConfigKey& key : config_keys()) {
    Config config = parse("");
    config.model = {.dim = 360, .heads = 6, .kv_heads = 3};  // leaves room to change one of them
    std::visit(Change{key}, key.slot(config));
    if (key.name == "model.dim") config.model.dim = 372;
    if (key.name == "model.heads") config.model.heads = 9;
    if (key.name == "model.kv_heads") config.model.kv_heads = 2;
    if (key.name == "model.head_dim") config.model.head_dim = 62;
    const std::string written = to_toml(config);
    EXPECT_NE(written, to_toml(parse(""))) << key.name;
    EXPECT_EQ(to_toml(parse(written)), written) << key.name;
  }
}

TEST(Config, every_key_can_be_overridden_by_what_it_is_written_as) {
  for (const ConfigKey& key : config_keys()) {
    Config config = parse("");
    config.model = {.dim = 360, .heads = 6, .kv_heads = 3};
    const std::string base = to_toml(config);
    std::visit(Change{key}, key.slot(config));
    if (key.name == "model.dim") config.model.dim = 372;
    if (key.name == "model.heads") config.model.heads = 9;
    if (key.name == "model.kv_heads") config.model.kv_heads = 2;
    if (key.name == "model.head_dim") config.model.head_dim = 62;
    const std::string written = to_toml(config);
    const std::string name(key.name.substr(key.name.find('.') + 1));
    const std::size_t section = written.find("[" + std::string(key.name.substr(0, key.name.find('.'))) + "]");
    const std::size_t start = written.find("\n" + name + " = ", section) + name.size() + 4;
    const std::string value = written.substr(start, written.find("\n", start) - start);
    EXPECT_EQ(to_toml(parse(base, {"--" + std::string(key.name) + "=" + value})), written)
        << key.name << " = " << value;
  }
}

constexpr const char* kRules = R"([optimizer]
kind = "muon"

[[optimizer.rules]]
match = 'layers\.0\.'
lr_scale = 2

[[optimizer.rules]]
match = ""
kind = "adamw8bit"
lr_scale = 0.5
weight_decay = 0.0
state_format = "power"
splits = [3, 5]
max_dims = 2
)";

TEST(Config, rules_of_the_optimizer_are_read_in_order) {
  const std::vector<optim::ParamRule> rules = parse(kRules).optimizer.rules;
  ASSERT_EQ(rules.size(), 2u);
  EXPECT_EQ(rules[0], (optim::ParamRule{.match = "layers\\.0\\.", .lr_scale = 2.0}));
  EXPECT_EQ(
      rules[1],
      (optim::ParamRule{
          .match = "",
          .kind = "adamw8bit",
          .lr_scale = 0.5,
          .weight_decay = 0.0,
          .state_format = "power",
          .splits = std::vector<Index>{3, 5},
          .max_dims = 2}));
}

TEST(Config, rules_survive_writing_and_reading) {
  const Config config = parse(kRules);
  const std::string written = to_toml(config);
  EXPECT_EQ(parse(written).optimizer.rules, config.optimizer.rules) << written;
  EXPECT_EQ(to_toml(parse(written)), written);
  expect_in(written, {"[[optimizer.rules]]", "splits = [3, 5]", "weight_decay = 0.0", "[parallel]"});
  EXPECT_TRUE(parse("[optimizer]\nrules = []\n").optimizer.rules.empty());
}

TEST(Config, mistakes_in_rules_are_named_with_their_place) {
  const auto rule = [](std::string_view text) { return message("[[optimizer.rules]]\n" + std::string(text)); };
  expect_in(rule("kind = \"muon\"\n"), {"'match'", "line 1"});
  expect_in(rule("match = \"a\"\nmatc = 3\n"), {"'matc'", "line 3", "'match'?"});
  expect_in(rule("match = 3\n"), {"a string", "3", "'optimizer.rules.match'", "line 2"});
  expect_in(rule("match = \"a\"\nsplits = [1.5]\n"), {"a list of integers >= 1", "splits", "line 3"});
  expect_in(rule("match = \"a\"\nsplits = [4, 0]\n"), {"a list of integers >= 1", "0", "optimizer.rules[0].splits"});
  expect_in(rule("match = \"a\"\nkind = \"moun\"\n"), {"one of adamw", "moun", "optimizer.rules[0].kind"});
  expect_in(rule("match = \"a\"\nlr_scale = -1.0\n"), {"a number >= 0", "-1", "optimizer.rules[0].lr_scale"});
  expect_in(rule("match = \"(\"\n"), {"regular expression", "'('", "optimizer.rules[0]"});
  expect_in(message("[optimizer]\nrules = 3\n"), {"[[optimizer.rules]]", "3", "line 2"});
  expect_in(message("[optimizer]\nrules = [1, 2]\n"), {"[[optimizer.rules]]", "a list of 2"});
}

TEST(Config, command_line_does_not_reach_rules_and_says_so) {
  expect_in(message("", {"--optimizer.rules=[]"}), {"--optimizer.rules=[]", "command line", "config file"});
  expect_in(message(kRules, {"--optimizer.rules.0.kind=adamw"}), {"command line", "[[optimizer.rules]]"});
}

TEST(Config, experts_of_a_token_are_at_most_all) {
  expect_in(
      message("[model]\nkind = \"moe\"\nexperts = 2\nexperts_per_token = 3\n"), {"model.experts_per_token", "3 and 2"});
  EXPECT_NO_THROW(parse("[model]\nexperts = 2\nexperts_per_token = 3\n"));  // of no matter without experts
}

TEST(Config, later_overrides_win_over_earlier_ones_and_over_the_file) {
  const Config config = parse("[train]\nsteps = 5\n", {"--train.steps=6", "--train.steps=7", "--train.lr=1"});
  EXPECT_EQ(config.train.steps, 7);
  EXPECT_EQ(config.train.lr, 1.0);
}

TEST(Config, override_text_needs_no_quotes) {
  EXPECT_EQ(parse("", {"--data.path=/some where/x"}).data.path, "/some where/x");
  EXPECT_EQ(parse("", {"--data.path=\"quoted\""}).data.path, "quoted");
  EXPECT_EQ(parse("", {"--data.path="}).data.path, "");
  EXPECT_EQ(parse("", {"--data.path=12"}).data.path, "12");
}

TEST(Config, unknown_key_suggests_the_nearest) {
  expect_in(message("[train]\n\nstep = 3\n"), {"'train.step'", "line 3", "'train.steps'?"});
  expect_in(message("[trian]\nsteps = 3\n"), {"'trian'", "line 1", "'train'?"});
  expect_in(message("", {"--train.warmpu=1"}), {"--train.warmpu=1", "'train.warmup'?"});
  expect_in(message("[model]\nsteps = 3\n"), {"'model.steps'", "'train.steps'?"});
  expect_in(message("", {"--steps=3"}), {"'train.steps'?"});
}

TEST(Config, unknown_key_far_from_all_suggests_nothing) {
  const std::string text = message("[train]\nzzzzzzzzzzzzzzz = 3\n");
  expect_in(text, {"'train.zzzzzzzzzzzzzzz'"});
  EXPECT_EQ(text.find("Did you mean"), std::string::npos) << text;
}

TEST(Config, key_outside_a_section_is_refused) {
  expect_in(message("steps = 3\n"), {"'steps'", "line 1", "'train.steps'?"});
  expect_in(message("train = 3\n"), {"'train'", "line 1"});
}

TEST(Config, value_of_another_type_says_what_came_and_what_was_expected) {
  expect_in(message("[train]\nsteps = \"ten\"\n"), {"an integer >= 1", "ten", "train.steps"});
  expect_in(message("[train]\nsteps = 1.5\n"), {"an integer >= 1", "1.5", "train.steps"});
  expect_in(message("[train]\nlr = true\n"), {"a number > 0", "true", "train.lr"});
  expect_in(message("[data]\npath = 3\n"), {"a string", "3", "data.path"});
  expect_in(message("[data]\nextensions = \".py\"\n"), {"a list of strings", "data.extensions"});
  expect_in(message("[data]\nextensions = [1]\n"), {"a list of strings", "data.extensions"});
  expect_in(message("[train.steps]\nx = 1\n"), {"an integer >= 1", "a table", "train.steps"});
  expect_in(message("", {"--train.steps=ten"}), {"an integer >= 1", "ten", "--train.steps=ten"});
  expect_in(message("", {"--parallel.reshard_after_forward=1"}), {"true or false", "parallel.reshard_after_forward"});
  expect_in(message("", {"--train.steps=1\nother = 2"}), {"an integer >= 1", "train.steps"});
}

TEST(Config, value_out_of_range_says_the_range) {
  expect_in(message("[train]\nsteps = 0\n"), {"an integer >= 1", "0", "train.steps"});
  expect_in(message("[train]\nsteps = 9223372036854775807\n"), {"train.steps"});
  expect_in(message("[train]\nlr = 0.0\n"), {"a number > 0", "train.lr"});
  expect_in(message("[train]\nlr = nan\n"), {"a number > 0", "nan", "train.lr"});
  expect_in(message("[train]\nclip = inf\n"), {"train.clip"});
  expect_in(message("[train]\nmin_lr_ratio = 1.5\n"), {"a number >= 0 and <= 1", "1.5"});
  expect_in(message("[train]\nparam_dtype = \"fp8\"\n"), {"one of auto, fp32, bf16", "fp8"});
  expect_in(message("[optimizer]\nbetas = [0.9, 1.0]\n"), {">= 0 and < 1", "optimizer.betas"});
  expect_in(message("[optimizer]\nbetas = [0.9]\n"), {"a list of 2 numbers", "1"});
  expect_in(message("[model]\nvocabulary = 255\n"), {"an integer >= 256", "255"});
}

TEST(Config, values_that_do_not_go_together_are_refused) {
  expect_in(message("[model]\nheads = 4\nkv_heads = 3\n"), {"model.kv_heads", "4 and 3"});
  expect_in(message("[model]\ndim = 12\nheads = 4\nkv_heads = 4\n"), {"model.dim", "12"});
  expect_in(message("[model]\ndim = 12\nheads = 4\nkv_heads = 4\nhead_dim = 5\n"), {"model.head_dim", "5"});
  EXPECT_NO_THROW(parse("[model]\ndim = 12\nheads = 4\nkv_heads = 4\nhead_dim = 6\n"));
  expect_in(message("[model]\nrope_low_frequency = 4\n"), {"model.rope_high_frequency", "4 and 4"});
}

TEST(Config, checkpoints_have_limits) {
  expect_in(message("[checkpoint]\nevery = -1\n"), {"checkpoint.every", ">= 0"});
  expect_in(message("", {"--checkpoint.keep=-1"}), {"checkpoint.keep", ">= 0"});
  expect_in(message("", {"--checkpoint.timeout_s=0"}), {"checkpoint.timeout_s", "> 0"});
}

TEST(Config, broken_toml_names_file_and_line) {
  expect_in(message("[train]\nsteps =\n"), {"some/demo.toml", "line 2"});
}

TEST(Config, malformed_override_is_refused) {
  expect_in(message("", {"--train.steps"}), {"--section.key=value", "'--train.steps'"});
  expect_in(message("", {"train.steps=3"}), {"--section.key=value", "'train.steps=3'"});
}

TEST(Config, missing_file_is_named) {
  try {
    load_config("/nowhere/x.toml");
    FAIL();
  } catch (const InvalidArgument& error) {
    expect_in(error.what(), {"/nowhere/x.toml"});
  }
  EXPECT_THROW(load_config(std::filesystem::temp_directory_path()), InvalidArgument);
}

TEST(Config, help_has_a_line_for_every_key) {
  const std::string help = describe_config_keys();
  for (const ConfigKey& key : config_keys()) expect_in(help, {key.name});
  for (const RuleKey& key : rule_keys()) expect_in(help, {key.help});
}

}  // namespace
}  // namespace ragged::train
