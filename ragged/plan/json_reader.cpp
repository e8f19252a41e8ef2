#include "ragged/plan/json_reader.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace ragged::plan::detail {

using Json = nlohmann::ordered_json;

Json parse_json(std::string_view text, int max_depth, std::string_view operation) {
  const auto check_depth = [&](int depth, Json::parse_event_t, const Json&) {
    RAGGED_CHECK(depth <= max_depth, "[{}] Expected at most {} levels of nesting, but got more.", operation, max_depth);
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), check_depth);
  } catch (const Json::exception& error) {
    RAGGED_CHECK(false, "[{}] Expected JSON, but got an error: {}", operation, error.what());
  }
  return {};
}

JsonNode::JsonNode(const Json& value, std::string path, std::string_view operation)
    : value_(value), path_(std::move(path)), operation_(operation) {}

void JsonNode::expect_object(std::size_t num_members) const {
  RAGGED_CHECK(value_.is_object(), "[{}] Expected an object at {}, but got {}.", operation_, path_, value_.type_name());
  RAGGED_CHECK(
      value_.size() == num_members, "[{}] Expected {} members at {}, but got {}. Was it written by another version?",
      operation_, num_members, path_, value_.size());
}

bool JsonNode::has(std::string_view name) const {
  RAGGED_CHECK(value_.is_object(), "[{}] Expected an object at {}, but got {}.", operation_, path_, value_.type_name());
  return value_.contains(std::string(name));
}

JsonNode JsonNode::member(std::string_view name) const {
  RAGGED_CHECK(has(name), "[{}] Expected a member '{}' at {}, but got none.", operation_, name, path_);
  return {*value_.find(std::string(name)), fmt::format("{}.{}", path_, name), operation_};
}

std::size_t JsonNode::array_size() const {
  RAGGED_CHECK(value_.is_array(), "[{}] Expected an array at {}, but got {}.", operation_, path_, value_.type_name());
  return value_.size();
}

JsonNode JsonNode::element(std::size_t i) const {
  return {value_[i], fmt::format("{}[{}]", path_, i), operation_};
}

Index JsonNode::integer(Index low, Index high) const {
  RAGGED_CHECK(
      value_.is_number_integer(), "[{}] Expected an integer at {}, but got {}.", operation_, path_, value_.type_name());
  const bool is_too_large =
      value_.is_number_unsigned() && value_.get<std::uint64_t>() > static_cast<std::uint64_t>(high);
  const Index number = is_too_large ? high : value_.get<Index>();
  RAGGED_CHECK(
      !is_too_large && low <= number && number <= high, "[{}] Expected an integer from {} to {} at {}, but got {}.",
      operation_, low, high, path_, value_.dump());
  return number;
}

bool JsonNode::boolean() const {
  RAGGED_CHECK(
      value_.is_boolean(), "[{}] Expected true or false at {}, but got {}.", operation_, path_, value_.type_name());
  return value_.get<bool>();
}

std::string JsonNode::string() const {
  RAGGED_CHECK(value_.is_string(), "[{}] Expected a string at {}, but got {}.", operation_, path_, value_.type_name());
  return value_.get<std::string>();
}

std::string JsonNode::string_or(std::string_view name, std::string fallback) const {
  return has(name) ? member(name).string() : std::move(fallback);
}

}  // namespace ragged::plan::detail
