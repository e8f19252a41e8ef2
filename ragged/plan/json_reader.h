// Reading JSON that strangers wrote: every step names the place in the text, and nothing is
// converted before its kind and range are known. Internal to plan.
#pragma once

#include <limits>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "ragged/base/math.h"

namespace ragged::plan::detail {

/// Parses text of at most `max_depth` levels: the library recurses over what it has read, so that a
/// text of brackets would use up the stack. Throws InvalidArgument, prefixed with [operation].
nlohmann::ordered_json parse_json(std::string_view text, int max_depth, std::string_view operation);

/// One JSON value and the path that leads to it, for the error texts. Refers to the value and to
/// the name of the operation: both must outlive it.
class JsonNode {
 public:
  JsonNode(const nlohmann::ordered_json& value, std::string path, std::string_view operation);

  const std::string& path() const { return path_; }

  /// Expects an object of exactly these many members.
  void expect_object(std::size_t num_members) const;
  bool has(std::string_view name) const;
  JsonNode member(std::string_view name) const;
  std::size_t array_size() const;
  JsonNode element(std::size_t i) const;

  Index integer(Index low = 0, Index high = std::numeric_limits<Index>::max()) const;
  bool boolean() const;
  std::string string() const;
  /// A member's text, or `fallback` where there is no such member.
  std::string string_or(std::string_view name, std::string fallback) const;

 private:
  const nlohmann::ordered_json& value_;
  std::string path_;
  std::string_view operation_;
};

}  // namespace ragged::plan::detail
