// The one table of configuration keys. Parsing, overrides, help, range checks and writing back all
// walk it, so a key is added by adding one row.
#pragma once

#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "ragged/train/config.h"

namespace ragged::train {

/// Where a key's value lives in a Config; which alternative says its type.
using ConfigSlot = std::variant<bool*, Index*, double*, std::string*, std::vector<double>*, std::vector<std::string>*>;

struct ConfigKey {
  std::string_view name;  // "section.key"
  ConfigSlot (*slot)(Config&);
  std::string_view help;
  double min = -std::numeric_limits<double>::infinity();  // of a number, or of each in a list
  double max = std::numeric_limits<double>::infinity();
  bool min_excluded = false;
  bool max_excluded = false;
  std::vector<std::string_view> choices = {};  // of a string; empty: anything
  std::size_t length = 0;                      // of a list; 0: any
};

/// In the order of sections and keys that files are written in.
std::span<const ConfigKey> config_keys();

/// Null when there is none of this name.
const ConfigKey* find_config_key(std::string_view name);

/// " Did you mean 'train.steps'?" for the known key, or section, that is nearest by edit distance;
/// empty when none is near.
std::string suggest_config_key(std::string_view name);

/// What the key takes, in words: "an integer >= 1", "one of auto, fp32, bf16".
std::string expected_value(const ConfigKey& key);

/// Throws InvalidArgument for the first value out of its key's range, then for values that don't go
/// together.
void validate(const Config& config);

}  // namespace ragged::train
