// What a config must hold beyond types: each key's range, and values that go together.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <fmt/format.h>

#include "ragged/base/error.h"
#include "ragged/train/config_keys.h"

namespace ragged::train {
namespace {

// The largest integer that TOML, JSON readers and doubles agree on.
constexpr double kMaxExact = 9007199254740992.0;

template <class Owner>
struct CheckRange {
  const KeyOf<Owner>& key;
  std::string name;  // with the list and position of its table

  void number(double value) const {
    // NaN fails both comparisons, so it is refused by every key.
    const bool above = key.min_excluded ? value > key.min : value >= key.min;
    const bool below = key.max_excluded ? value < key.max : value <= key.max;
    RAGGED_CHECK(
        above && below && std::isfinite(value), "[config] Expected {}, but got {} (key '{}').", expected_value(key),
        value, name);
  }
  void operator()(const bool*) const {}
  void operator()(const Index* value) const {
    number(static_cast<double>(*value));
    RAGGED_CHECK(
        static_cast<double>(*value) <= kMaxExact, "[config] Expected {}, but got {} (key '{}').", expected_value(key),
        *value, name);
  }
  void operator()(const double* value) const { number(*value); }
  void operator()(const std::string* value) const {
    RAGGED_CHECK(
        key.choices.empty() || std::ranges::find(key.choices, *value) != key.choices.end(),
        "[config] Expected {}, but got \"{}\" (key '{}').", expected_value(key), *value, name);
  }
  template <class Value>
  void operator()(const std::vector<Value>* values) const {
    RAGGED_CHECK(
        key.length == 0 || values->size() == key.length, "[config] Expected {}, but got {} of them (key '{}').",
        expected_value(key), values->size(), name);
    for (const Value& value : *values) (*this)(&value);
  }
  template <class Value>
  void operator()(const std::optional<Value>* value) const {
    if (*value) (*this)(&**value);
  }
};

void validate_rules(const std::vector<optim::ParamRule>& rules) {
  for (std::size_t i = 0; i < rules.size(); ++i) {
    const std::string table = fmt::format("{}[{}]", kRulesName, i);
    optim::ParamRule copy = rules[i];
    for (const RuleKey& key : rule_keys()) {
      std::visit(CheckRange<optim::ParamRule>{key, fmt::format("{}.{}", table, key.name)}, key.slot(copy));
    }
    optim::check_rule(copy, table);
  }
}

void validate_model(const ModelConfig& model) {
  RAGGED_CHECK(
      model.heads % model.kv_heads == 0,
      "[config] Expected model.heads to be a multiple of model.kv_heads, but got {} and {}. Every "
      "key head serves the same number of query heads.",
      model.heads, model.kv_heads);
  RAGGED_CHECK(
      model.head_dim > 0 || model.dim % (2 * model.heads) == 0,
      "[config] Expected model.dim to be a multiple of 2 * model.heads, but got {} and {} heads. "
      "Rotary positions turn pairs of elements in a head.",
      model.dim, model.heads);
  RAGGED_CHECK(
      model.head_dim % 2 == 0,
      "[config] Expected an even model.head_dim, but got {}. Rotary positions turn pairs of elements in a head.",
      model.head_dim);
  RAGGED_CHECK(
      model.rope_high_frequency > model.rope_low_frequency,
      "[config] Expected model.rope_high_frequency above model.rope_low_frequency, but got {} and {}.",
      model.rope_high_frequency, model.rope_low_frequency);
  RAGGED_CHECK(
      model.kind != "moe" || model.experts_per_token <= model.experts,
      "[config] Expected model.experts_per_token <= model.experts, but got {} and {}.", model.experts_per_token,
      model.experts);
}

}  // namespace

void validate(const Config& config) {
  Config copy = config;
  for (const ConfigKey& key : config_keys()) {
    std::visit(CheckRange<Config>{key, std::string(key.name)}, key.slot(copy));
  }
  validate_model(config.model);
  validate_rules(config.optimizer.rules);
}

}  // namespace ragged::train
