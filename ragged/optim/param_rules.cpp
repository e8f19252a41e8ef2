#include "ragged/optim/param_rules.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <regex>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ragged/base/error.h"
#include "ragged/base/text.h"

namespace ragged::optim {
namespace {

constexpr std::string_view kKinds[] = {"adamw", "adamw8bit", "muon", "soap"};

bool is_matrix_optimizer(std::string_view kind) {
  return kind == "muon" || kind == "soap";
}

void check_kind(std::string_view kind, std::string_view where) {
  if (std::ranges::find(kKinds, kind) != std::end(kKinds)) return;
  std::string hint;
  for (const std::string_view known : kKinds) {
    if (hint.empty() && edit_distance(kind, known) <= 2) hint = fmt::format(" Did you mean '{}'?", known);
  }
  RAGGED_CHECK(
      false, "[optimizer] Expected one of {}, but got '{}' ({}).{}", fmt::join(kKinds, ", "), kind, where, hint);
}

std::regex compile(const ParamRule& rule, std::string_view where) {
  try {
    return std::regex(rule.match, std::regex::ECMAScript | std::regex::optimize);
  } catch (const std::regex_error& error) {
    throw InvalidArgument(fmt::format(
        "[optimizer] Expected a regular expression, but got '{}' ({}): {}. Full names such as "
        "'layers.0.self_attn.q_proj.weight' are searched for it; a dot is '\\\\.' in TOML's double quotes, '\\.' in "
        "single ones.",
        rule.match, where, error.what()));
  }
}

void check_number(const std::optional<double>& value, std::string_view key, std::string_view where) {
  RAGGED_CHECK(
      !value || (std::isfinite(*value) && *value >= 0.0), "[optimizer] Expected {} >= 0, but got {} ({}).", key,
      value.value_or(0.0), where);
}

void apply(const ParamRule& rule, ParamChoice& choice) {
  if (rule.kind) choice.kind = *rule.kind;
  if (rule.lr_scale) choice.lr_scale = *rule.lr_scale;
  if (rule.weight_decay) choice.weight_decay = rule.weight_decay;
  if (rule.state_format) choice.state_format = rule.state_format;
  if (rule.splits) choice.splits = *rule.splits;
}

// Returns to how many parameters it applied.
std::size_t apply_to_all(
    const ParamRule& rule, std::string_view where, std::span<const ParamFacts> params, std::span<ParamChoice> choices) {
  const std::regex pattern = compile(rule, where);
  std::size_t matched = 0;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto dims = static_cast<Index>(params[i].shape.size());
    if (rule.max_dims && dims > *rule.max_dims) continue;
    if (!std::regex_search(params[i].name, pattern)) continue;
    apply(rule, choices[i]);
    ++matched;
  }
  return matched;
}

// The parameter whose name is nearest to what the expression would match, for a message.
std::string_view nearest_name(std::string_view match, std::span<const ParamFacts> params) {
  const auto distance = [match](const ParamFacts& param) { return edit_distance(param.name, match); };
  const auto nearest = std::ranges::min_element(params, {}, distance);
  return nearest == params.end() ? std::string_view() : nearest->name;
}

void check_choice(const ParamChoice& choice, const ParamFacts& param) {
  const auto dims = static_cast<Index>(param.shape.size());
  if (is_matrix_optimizer(choice.kind)) {
    RAGGED_CHECK(
        dims >= 2,
        "[optimizer] Expected matrices for {}, but got shape [{}] (param '{}'). Add a rule that matches it with kind = "
        "\"adamw\", after the one that sent it there.",
        choice.kind, fmt::join(param.shape, ", "), param.name);
  }
  if (choice.splits.empty()) return;
  RAGGED_CHECK(
      is_matrix_optimizer(choice.kind),
      "[optimizer] Expected splits on a parameter of muon or soap, but it goes to {} (param '{}'). Take splits out of "
      "the rule, or give it a kind.",
      choice.kind, param.name);
  const Index rows = param.shape[static_cast<std::size_t>(dims - 2)];
  const Index sum = std::accumulate(choice.splits.begin(), choice.splits.end(), Index{0});
  RAGGED_CHECK(
      sum == rows,
      "[optimizer] Expected splits that sum to the {} rows of a matrix, but got [{}], {} in all (param '{}').", rows,
      fmt::join(choice.splits, ", "), sum, param.name);
}

}  // namespace

std::span<const std::string_view> optimizer_kinds() {
  return kKinds;
}

std::vector<ParamRule> default_rules(std::string_view kind) {
  std::vector<ParamRule> rules;
  if (is_matrix_optimizer(kind)) {
    const std::optional<std::string> adamw = "adamw";
    rules.push_back({.match = "(^|\\.)(embed_tokens|wte|wpe|lm_head)\\.", .kind = adamw});
    rules.push_back({.match = "(^|\\.)(router|gate)\\.", .kind = adamw});
    rules.push_back({.match = "bias$", .kind = adamw});
    rules.push_back({.match = "", .kind = adamw, .max_dims = 1});
  }
  // The biases of stacked experts are [experts, out], and biases still: they neither decay nor lie in tiles.
  std::optional<std::string> format;
  if (kind == "adamw8bit") format = "fp32";
  rules.push_back({.match = "bias$", .weight_decay = 0.0, .state_format = format});
  return rules;
}

void check_rule(const ParamRule& rule, std::string_view where) {
  if (rule.kind) check_kind(*rule.kind, where);
  check_number(rule.lr_scale, "lr_scale", where);
  check_number(rule.weight_decay, "weight_decay", where);
  if (rule.splits) {
    for (const Index rows : *rule.splits) {
      RAGGED_CHECK(rows >= 1, "[optimizer] Expected splits of 1 row and more, but got {} ({}).", rows, where);
    }
  }
  RAGGED_CHECK(
      !rule.max_dims || *rule.max_dims >= 1, "[optimizer] Expected max_dims >= 1, but got {} ({}).",
      rule.max_dims.value_or(0), where);
  compile(rule, where);
}

std::vector<ParamChoice> resolve(
    std::string_view kind, std::span<const ParamRule> rules, std::span<const ParamFacts> params) {
  check_kind(kind, "optimizer.kind");
  ParamChoice base;
  base.kind = kind;
  std::vector<ParamChoice> choices(params.size(), base);
  for (const ParamRule& rule : default_rules(kind)) apply_to_all(rule, "default rules", params, choices);
  for (std::size_t i = 0; i < rules.size(); ++i) {
    const std::string where = fmt::format("rule {} of {}", i + 1, rules.size());
    check_rule(rules[i], where);
    const std::size_t matched = apply_to_all(rules[i], where, params, choices);
    RAGGED_CHECK(
        matched > 0,
        "[optimizer] Expected a rule to match a parameter, but '{}' matches none of {} ({}). The nearest name is '{}'; "
        "correct the rule or take it out.",
        rules[i].match, params.size(), where, nearest_name(rules[i].match, params));
  }
  for (std::size_t i = 0; i < params.size(); ++i) check_choice(choices[i], params[i]);
  return choices;
}

std::string to_string(const ParamRule& rule) {
  std::vector<std::string> parts;
  if (rule.kind) parts.push_back("kind " + *rule.kind);
  if (rule.lr_scale) parts.push_back(fmt::format("lr_scale {}", *rule.lr_scale));
  if (rule.weight_decay) parts.push_back(fmt::format("weight_decay {}", *rule.weight_decay));
  if (rule.state_format) parts.push_back("state_format " + *rule.state_format);
  if (rule.splits) parts.push_back(fmt::format("splits [{}]", fmt::join(*rule.splits, ", ")));
  const std::string dims = rule.max_dims ? fmt::format(" of at most {} dims", *rule.max_dims) : "";
  return fmt::format("match '{}'{}: {}", rule.match, dims, fmt::join(parts, ", "));
}

}  // namespace ragged::optim
