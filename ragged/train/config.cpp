#include "ragged/train/config.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

#include <fmt/format.h>
#include <toml++/toml.h>

#include "ragged/train/config_keys.h"

namespace ragged::train {
namespace {

// Where a value came from, for messages: "demo.toml line 12", "--train.steps=x".
std::string place(std::string_view source, const toml::node& node) {
  return fmt::format("{} line {}", source, node.source().begin.line);
}

std::string to_text(const toml::node& node) {
  std::ostringstream out;
  node.visit([&out](const auto& value) {
    if constexpr (toml::is_table<decltype(value)>) {
      out << "a table";
    } else if constexpr (toml::is_array<decltype(value)>) {
      out << (value.is_array_of_tables() ? "a list of tables" : fmt::format("a list of {}", value.size()));
    } else {
      out << toml::toml_formatter(value);
    }
  });
  return out.str();
}

// Integers are numbers too; the reverse would silently round.
std::optional<double> number(const toml::node& node) {
  if (const auto* value = node.as_floating_point()) return value->get();
  if (const auto* value = node.as_integer()) return static_cast<double>(value->get());
  return std::nullopt;
}

// Assigns a TOML value to a slot; false when the type isn't the slot's.
struct Assign {
  const toml::node& node;

  bool operator()(bool* slot) const { return assign(node.value_exact<bool>(), *slot); }
  bool operator()(Index* slot) const { return assign(node.value_exact<int64_t>(), *slot); }
  bool operator()(double* slot) const { return assign(number(node), *slot); }
  bool operator()(std::string* slot) const { return assign(node.value_exact<std::string>(), *slot); }
  bool operator()(std::vector<Index>* slot) const {
    return assign_list(*slot, [](const toml::node& item) { return item.value_exact<int64_t>(); });
  }
  bool operator()(std::vector<double>* slot) const {
    return assign_list(*slot, [](const toml::node& item) { return number(item); });
  }
  bool operator()(std::vector<std::string>* slot) const {
    return assign_list(*slot, [](const toml::node& item) { return item.value_exact<std::string>(); });
  }
  template <class Value>
  bool operator()(std::optional<Value>* slot) const {
    Value value{};
    if (!(*this)(&value)) return false;
    *slot = std::move(value);
    return true;
  }

  template <class Value, class Slot>
  static bool assign(const std::optional<Value>& value, Slot& slot) {
    if (value) slot = *value;
    return value.has_value();
  }

  template <class Item, class Read>
  bool assign_list(std::vector<Item>& slot, Read read) const {
    const toml::array* array = node.as_array();
    if (!array) return false;
    std::vector<Item> items;
    for (const toml::node& item : *array) {
      const auto value = read(item);
      if (!value) return false;
      items.push_back(*value);
    }
    slot = std::move(items);
    return true;
  }
};

void set_key(Config& config, std::string_view name, const toml::node& node, std::string_view where) {
  const ConfigKey* key = find_config_key(name);
  RAGGED_CHECK(
      key, "[config] Expected a known key, but got '{}' ({}).{} `ragged train --help` lists them.", name, where,
      suggest_config_key(name));
  RAGGED_CHECK(
      std::visit(Assign{node}, key->slot(config)), "[config] Expected {}, but got {} (key '{}', {}).",
      expected_value(*key), to_text(node), name, where);
}

// One table of the list; keys of a rule aren't keys of a config.
optim::ParamRule read_rule(const toml::table& table, std::string_view where, std::string_view source) {
  optim::ParamRule rule;
  RAGGED_CHECK(
      table.contains("match"),
      "[config] Expected a rule to have 'match', a regular expression over names of parameters, but got none ({}). "
      "match = \"\" matches all.",
      where);
  for (const auto& [name, node] : table) {
    const auto key = std::ranges::find(rule_keys(), name.str(), &RuleKey::name);
    RAGGED_CHECK(
        key != rule_keys().end(),
        "[config] Expected a key of a rule, but got '{}' ({}).{} `ragged train --help` lists "
        "them.",
        name.str(), place(source, node), suggest_rule_key(name.str()));
    RAGGED_CHECK(
        std::visit(Assign{node}, key->slot(rule)), "[config] Expected {}, but got {} (key '{}.{}', {}).",
        expected_value(*key), to_text(node), kRulesName, name.str(), place(source, node));
  }
  return rule;
}

std::vector<optim::ParamRule> read_rules(const toml::node& node, std::string_view source) {
  const toml::array* array = node.as_array();
  RAGGED_CHECK(
      array && (array->empty() || array->is_array_of_tables()), "[config] Expected tables [[{}]], but got {} ({}).",
      kRulesName, to_text(node), place(source, node));
  std::vector<optim::ParamRule> rules;
  for (const toml::node& item : *array) rules.push_back(read_rule(*item.as_table(), place(source, item), source));
  return rules;
}

void apply_table(Config& config, const toml::table& root, std::string_view source) {
  for (const auto& [section, node] : root) {
    const toml::table* table = node.as_table();
    const bool known = std::ranges::any_of(
        config_keys(), [&](const ConfigKey& key) { return key.name.starts_with(fmt::format("{}.", section.str())); });
    RAGGED_CHECK(
        table && known, "[config] Expected a known section, but got '{}' ({}).{}", section.str(), place(source, node),
        suggest_config_key(section.str()));
    for (const auto& [key, value] : *table) {
      const std::string name = fmt::format("{}.{}", section.str(), key.str());
      if (name == kRulesName) {
        config.optimizer.rules = read_rules(value, source);
      } else {
        set_key(config, name, value, place(source, value));
      }
    }
  }
}

toml::table parse(std::string_view text, std::string_view source) {
  try {
    return toml::parse(text);
  } catch (const toml::parse_error& error) {
    throw InvalidArgument(fmt::format(
        "[config] Expected TOML, but got an error at {} line {}: {}", source, error.source().begin.line,
        error.description()));
  }
}

// "--train.steps=10". What stands behind '=' is TOML, except that text needs no quotes.
void apply_override(Config& config, const std::string& argument) {
  const std::size_t equals = argument.find('=');
  RAGGED_CHECK(
      argument.starts_with("--") && equals != std::string::npos && equals > 2,
      "[config] Expected --section.key=value, but got '{}'.{}", argument,
      suggest_config_key(std::string_view(argument).substr(argument.starts_with("--") ? 2 : 0)));
  const std::string name = argument.substr(2, equals - 2);
  RAGGED_CHECK(
      !name.starts_with(kRulesName),
      "[config] Expected rules in the config file, but got '{}': the command line doesn't reach [[{}]].", argument,
      kRulesName);
  const std::string text = argument.substr(equals + 1);
  const ConfigKey* key = find_config_key(name);
  const bool bare_text = key && std::holds_alternative<std::string*>(key->slot(config)) && !text.starts_with('"') &&
      !text.starts_with('\'');
  if (bare_text) {
    set_key(config, name, toml::value<std::string>(text), argument);
    return;
  }
  toml::table table;
  try {
    table = toml::parse("value = " + text);
  } catch (const toml::parse_error&) {
    // Not TOML, so it can't be what the key takes; as a string it gets the ordinary message.
    table.insert_or_assign("value", text);
  }
  // A line break in the argument could smuggle in more than one value.
  if (table.size() != 1) table = toml::table{{"value", text}};
  set_key(config, name, *table.get("value"), argument);
}

// A TOML basic string: on one line whatever it holds, so that it can be pasted as an override.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      out += fmt::format("\\u{:04X}", static_cast<int>(c));
    } else {
      out += c;
    }
  }
  return out + "\"";
}

// The shortest digits that read back to the same value, which toml++'s own formatter doesn't look
// for.
struct WriteValue {
  std::string operator()(const bool* value) const { return *value ? "true" : "false"; }
  std::string operator()(const Index* value) const { return fmt::format("{}", *value); }
  std::string operator()(const double* value) const {
    const std::string text = fmt::format("{}", *value);
    return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
  }
  std::string operator()(const std::string* value) const { return quoted(*value); }
  template <class T>
  std::string operator()(const std::vector<T>* values) const {
    std::string text;
    for (const T& value : *values) text += (text.empty() ? "" : ", ") + (*this)(&value);
    return "[" + text + "]";
  }
  template <class T>
  std::string operator()(const std::optional<T>* value) const {
    return *value ? (*this)(&**value) : "";
  }
};

std::string write_rules(const std::vector<optim::ParamRule>& rules) {
  std::string text;
  for (optim::ParamRule rule : rules) {
    text += fmt::format("\n[[{}]]\n", kRulesName);
    for (const RuleKey& key : rule_keys()) {
      const std::string value = std::visit(WriteValue{}, key.slot(rule));
      if (!value.empty()) text += fmt::format("{} = {}\n", key.name, value);  // empty: left out
    }
  }
  return text;
}

}  // namespace

Config parse_config(std::string_view toml, std::string_view source, std::span<const std::string> overrides) {
  Config config;
  apply_table(config, parse(toml, source), source);
  for (const std::string& argument : overrides) apply_override(config, argument);
  if (config.run.dir.empty()) {
    config.run.dir = (std::filesystem::path("runs") / std::filesystem::path(source).stem()).string();
  }
  validate(config);
  return config;
}

Config load_config(const std::filesystem::path& path, std::span<const std::string> overrides) {
  std::error_code ignored;
  std::ifstream file(path, std::ios::binary);
  RAGGED_CHECK(
      file && !std::filesystem::is_directory(path, ignored),
      "[config] Expected a TOML file, but '{}' can't be read. configs/demo.toml is one to start "
      "from.",
      path.string());
  std::ostringstream text;
  text << file.rdbuf();
  return parse_config(text.str(), path.string(), overrides);
}

std::string to_toml(const Config& config) {
  Config copy = config;
  std::string text;
  std::string_view current;
  const std::string_view section_of_rules = kRulesName.substr(0, kRulesName.find('.'));
  for (const ConfigKey& key : config_keys()) {
    const std::string_view section = key.name.substr(0, key.name.find('.'));
    if (section != current) {
      if (current == section_of_rules) text += write_rules(config.optimizer.rules);
      text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", section);
      current = section;
    }
    text += fmt::format("{} = {}\n", key.name.substr(section.size() + 1), std::visit(WriteValue{}, key.slot(copy)));
  }
  return text;
}

std::string describe_config_keys() {
  Config defaults;
  std::string text;
  for (const ConfigKey& key : config_keys()) {
    text += fmt::format("  {:<32} {} [{}]\n", key.name, key.help, std::visit(WriteValue{}, key.slot(defaults)));
  }
  text += fmt::format("\nKeys of a [[{}]] table, in the file alone; a later rule wins, in what it says:\n", kRulesName);
  for (const RuleKey& key : rule_keys())
    text += fmt::format("  {:<32} {} ({})\n", key.name, key.help, expected_value(key));
  return text;
}

}  // namespace ragged::train
