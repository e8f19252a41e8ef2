#include "ragged/plan/safetensors_index.h"

#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "ragged/plan/json_reader.h"

namespace ragged::plan {
namespace {

constexpr std::string_view kOperation = "safetensors";
constexpr const char* kMap = "weight_map";
constexpr int kMaxDepth = 8;  // an index has two levels

// nlohmann keeps the last of two equal names without a word.
void check_names(std::string_view text, std::string_view source) {
  std::set<std::string> names;
  std::string twice;
  int maps = 0;
  bool is_in_map = false;
  const auto look = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    if (event != nlohmann::json::parse_event_t::key) return true;
    const auto name = value.get<std::string>();
    if (depth == 1) {
      is_in_map = name == kMap;
      if (is_in_map && ++maps > 1) twice = name;
    } else if (depth == 2 && is_in_map && !names.insert(name).second) {
      twice = name;
    }
    return true;
  };
  const nlohmann::json ignored = nlohmann::json::parse(text, look, false);
  RAGGED_CHECK(
      twice.empty(), "[{}] Expected tensors of different names, but got '{}' twice ('{}').", kOperation, twice, source);
}

// "model-00001-of-00002.safetensors": no folders, and not the folder itself.
bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find_first_of(std::string_view("/\\\0", 3)) == name.npos;
}

}  // namespace

std::map<std::string, std::string> parse_safetensors_index(std::string_view text, std::string_view source) {
  nlohmann::ordered_json json;
  try {
    json = detail::parse_json(text, kMaxDepth, kOperation);
  } catch (const InvalidArgument& error) {
    RAGGED_CHECK(false, "{} The index '{}' is damaged.", error.what(), source);
  }
  RAGGED_CHECK(
      json.is_object() && json.contains(kMap) && json[kMap].is_object(),
      "[{}] Expected an object '{}', but got none ('{}').", kOperation, kMap, source);
  check_names(text, source);
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : json[kMap].items()) {
    const std::string beside = file.is_string() ? file.get<std::string>() : "";
    RAGGED_CHECK(
        is_plain_name(beside), "[{}] Expected the name of a file beside the index, but got {} ('{}', tensor '{}').",
        kOperation, file.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), source, name);
    files[name] = beside;
  }
  RAGGED_CHECK(!files.empty(), "[{}] Expected tensors in the '{}', but got none ('{}').", kOperation, kMap, source);
  return files;
}

std::string write_safetensors_index(const std::map<std::string, std::string>& files, Index total_bytes) {
  nlohmann::ordered_json json;
  json["metadata"] = {{"total_size", total_bytes}};
  json[kMap] = files;
  try {
    return json.dump(2) + "\n";
  } catch (const nlohmann::json::exception& error) {
    RAGGED_CHECK(false, "[{}] Expected names in UTF-8, but got an error: {}", kOperation, error.what());
  }
  return {};
}

}  // namespace ragged::plan
