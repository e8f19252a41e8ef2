// The one table of configuration keys. Parsing, overrides, help, range checks and writing back all
// walk it, so a key is added by adding one row.
#pragma once

#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "ragged/train/config.h"

namespace ragged::train {

/// Where a key's value lives; which alternative says its type. Optional ones may be left out.
using ConfigSlot = std::variant<
    bool*, Index*, double*, std::string*, std::vector<double>*, std::vector<std::string>*, std::optional<Index>*,
    std::optional<double>*, std::optional<std::string>*, std::optional<std::vector<Index>>*>;

/// A key of a whole config, or of one table in a list of tables.
template <class Owner>
struct KeyOf {
  std::string_view name;  // "section.key"; of a list's tables "key"
  ConfigSlot (*slot)(Owner&);
  std::string_view help;
  double min = -std::numeric_limits<double>::infinity();  // of a number, or of each in a list
  double max = std::numeric_limits<double>::infinity();
  bool min_excluded = false;
  bool max_excluded = false;
  std::span<const std::string_view> choices = {};  // of a string; empty: anything
  std::size_t length = 0;                          // of a list; 0: any
};
using ConfigKey = KeyOf<Config>;
using RuleKey = KeyOf<optim::ParamRule>;

/// In the order of sections and keys that files are written in.
std::span<const ConfigKey> config_keys();

/// Null when there is none of this name.
const ConfigKey* find_config_key(std::string_view name);

/// The one list of tables, [[optimizer.rules]], and the keys of each.
inline constexpr std::string_view kRulesName = "optimizer.rules";
std::span<const RuleKey> rule_keys();
/// " Did you mean 'match'?", or nothing.
std::string suggest_rule_key(std::string_view name);

/// " Did you mean 'train.steps'?" for the known key, or section, that is nearest by edit distance;
/// empty when none is near.
std::string suggest_config_key(std::string_view name);

/// What the key takes, in words: "an integer >= 1", "one of auto, fp32, bf16".
std::string expected_value(const ConfigKey& key);
std::string expected_value(const RuleKey& key);

/// Throws InvalidArgument for the first value out of its key's range, then for values that don't go
/// together.
void validate(const Config& config);

}  // namespace ragged::train
