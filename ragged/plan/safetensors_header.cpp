#include "ragged/plan/safetensors_header.h"

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "ragged/plan/json_reader.h"

namespace ragged::plan {
namespace {

using detail::JsonNode;

constexpr std::string_view kOperation = "safetensors";
constexpr std::string_view kMetadata = "__metadata__";
constexpr std::uint64_t kMaxHeader = 100'000'000;  // the format's limit
constexpr int kMaxDepth = 8;                       // the format has three levels
constexpr std::size_t kMaxTensors = std::size_t{1} << 22;
constexpr std::size_t kMaxDims = 32;

// Their product with 64 bits still fits.
Index checked_numel(const SafetensorsEntry& tensor, std::string_view source) {
  constexpr Index kMost = Index{1} << 56;
  Index numel = -1;
  try {
    numel = checked_product(tensor.shape);
  } catch (const InvalidArgument&) {
  }
  RAGGED_CHECK(
      numel >= 0 && numel <= kMost,
      "[{}] Expected a tensor of at most 2^56 elements, but got more ('{}', tensor '{}').", kOperation, source,
      tensor.name);
  return numel;
}

SafetensorsEntry read_entry(const std::string& name, const nlohmann::ordered_json& json, std::string_view source) {
  const JsonNode node(json, std::string(source) + ": " + name, kOperation);
  SafetensorsEntry entry;
  entry.name = name;
  entry.dtype = node.member("dtype").string();
  const JsonNode shape = node.member("shape");
  RAGGED_CHECK(
      shape.array_size() <= kMaxDims, "[{}] Expected at most {} dims, but got {} ('{}', tensor '{}').", kOperation,
      kMaxDims, shape.array_size(), source, name);
  for (std::size_t d = 0; d < shape.array_size(); ++d) entry.shape.push_back(shape.element(d).integer());
  const JsonNode offsets = node.member("data_offsets");
  RAGGED_CHECK(
      offsets.array_size() == 2, "[{}] Expected two data_offsets, but got {} ('{}', tensor '{}').", kOperation,
      offsets.array_size(), source, name);
  entry.begin = offsets.element(0).integer();
  entry.end = offsets.element(1).integer();
  const Index bits = safetensors_bits(entry.dtype);
  const Index expected = bits * checked_numel(entry, source) / 8;
  RAGGED_CHECK(
      entry.begin <= entry.end && (bits == 0 || entry.end - entry.begin == expected),
      "[{}] Expected {} bytes for the shape of '{}', but got data_offsets {} to {} ('{}'). The header is damaged.",
      kOperation, expected, name, entry.begin, entry.end, source);
  return entry;
}

std::map<std::string, std::string> read_metadata(const nlohmann::ordered_json& json, std::string_view source) {
  RAGGED_CHECK(json.is_object(), "[{}] Expected an object '{}' ('{}').", kOperation, kMetadata, source);
  std::map<std::string, std::string> metadata;
  for (const auto& [key, value] : json.items()) {
    metadata[key] = JsonNode(value, fmt::format("{}: {}.{}", source, kMetadata, key), kOperation).string();
  }
  return metadata;
}

// nlohmann keeps the last of two equal names without a word.
void check_names(std::string_view json, std::string_view source) {
  std::set<std::string> names;
  std::string twice;
  const auto look = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    if (event == nlohmann::json::parse_event_t::key && depth == 1) {
      const auto name = value.get<std::string>();
      if (!names.insert(name).second) twice = name;
    }
    return depth <= 1;  // what lies deeper needn't be kept
  };
  const nlohmann::json names_only = nlohmann::json::parse(json, look, false);
  RAGGED_CHECK(
      twice.empty(), "[{}] Expected tensors of different names, but got '{}' twice ('{}').", kOperation, twice, source);
}

// The bytes behind the header are used up by the tensors, each byte once.
void check_bytes(const std::vector<SafetensorsEntry>& tensors, std::uint64_t data, std::string_view source) {
  Index end = 0;
  for (const SafetensorsEntry& entry : tensors) {
    RAGGED_CHECK(
        entry.begin >= end, "[{}] Expected tensors in bytes of their own, but '{}' overlaps another ('{}').",
        kOperation, entry.name, source);
    RAGGED_CHECK(
        entry.begin == end,
        "[{}] Expected tensors without holes between them, but got {} unused bytes before '{}' ('{}').", kOperation,
        entry.begin - end, entry.name, source);
    end = entry.end;
  }
  RAGGED_CHECK(
      static_cast<std::uint64_t>(end) == data,
      "[{}] Expected {} bytes of data behind the header, but got {} ('{}'). The file is {}.", kOperation, end, data,
      source, static_cast<std::uint64_t>(end) > data ? "truncated" : "damaged");
}

}  // namespace

Index safetensors_bits(std::string_view dtype) {
  static const std::map<std::string_view, Index> kBits = {
      {"F64", 64},        {"I64", 64},    {"U64", 64},    {"C64", 64},    {"F32", 32},    {"I32", 32},
      {"U32", 32},        {"F16", 16},    {"BF16", 16},   {"I16", 16},    {"U16", 16},    {"I8", 8},
      {"U8", 8},          {"BOOL", 8},    {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
      {"F8_E5M2FNUZ", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4}};
  const auto found = kBits.find(dtype);
  return found == kBits.end() ? 0 : found->second;
}

std::uint64_t safetensors_header_bytes(std::string_view start, std::uint64_t file_bytes, std::string_view source) {
  RAGGED_CHECK(
      start.size() >= kSafetensorsLengthBytes && file_bytes >= kSafetensorsLengthBytes,
      "[{}] Expected a file of at least {} bytes, but got {} ('{}'). It is truncated, or no safetensors file.",
      kOperation, kSafetensorsLengthBytes, std::min<std::uint64_t>(start.size(), file_bytes), source);
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kSafetensorsLengthBytes; ++i) {
    length |= std::uint64_t{static_cast<unsigned char>(start[i])} << (8 * i);
  }
  RAGGED_CHECK(
      length <= kMaxHeader, "[{}] Expected a header of at most {} bytes, but got {} ('{}'). It is no safetensors file.",
      kOperation, kMaxHeader, length, source);
  RAGGED_CHECK(
      length <= file_bytes - kSafetensorsLengthBytes,
      "[{}] Expected a header of {} bytes, but the file has only {} ('{}'). It is truncated, or no safetensors file.",
      kOperation, length, file_bytes, source);
  return length;
}

SafetensorsHeader parse_safetensors_header(std::string_view start, std::uint64_t file_bytes, std::string_view source) {
  const std::uint64_t length = safetensors_header_bytes(start, file_bytes, source);
  RAGGED_CHECK(
      start.size() - kSafetensorsLengthBytes >= length,
      "[{}] Expected a header of {} bytes, but could read only {} ('{}').", kOperation, length,
      start.size() - kSafetensorsLengthBytes, source);
  const std::string_view text = start.substr(kSafetensorsLengthBytes, length);
  nlohmann::ordered_json json;
  try {
    json = detail::parse_json(text, kMaxDepth, kOperation);
  } catch (const InvalidArgument& error) {
    RAGGED_CHECK(false, "{} The header of '{}' is damaged.", error.what(), source);
  }
  RAGGED_CHECK(json.is_object(), "[{}] Expected a header of named tensors, but got none ('{}').", kOperation, source);
  RAGGED_CHECK(
      json.size() <= kMaxTensors, "[{}] Expected at most {} tensors, but got {} ('{}').", kOperation, kMaxTensors,
      json.size(), source);
  check_names(text, source);
  SafetensorsHeader header;
  header.data_offset = kSafetensorsLengthBytes + length;
  for (const auto& [name, value] : json.items()) {
    if (name == kMetadata) {
      header.metadata = read_metadata(value, source);
    } else {
      header.tensors.push_back(read_entry(name, value, source));
    }
  }
  // Empty tensors before others that begin at the same byte.
  std::ranges::stable_sort(header.tensors, {}, [](const SafetensorsEntry& e) { return std::pair(e.begin, e.end); });
  check_bytes(header.tensors, file_bytes - header.data_offset, source);
  return header;
}

std::string write_safetensors_header(
    const std::vector<SafetensorsEntry>& tensors, const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json[kMetadata] = metadata;
  for (const SafetensorsEntry& entry : tensors) {
    json[entry.name] = {{"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string text;
  try {
    text = json.dump();
  } catch (const nlohmann::json::exception& error) {
    RAGGED_CHECK(false, "[{}] Expected names in UTF-8, but got an error: {}", kOperation, error.what());
  }
  text.resize(static_cast<std::size_t>(round_up(static_cast<Index>(text.size()), 8)), ' ');
  RAGGED_CHECK(
      text.size() <= kMaxHeader, "[{}] Expected a header of at most {} bytes, but got {}. Write fewer tensors a file.",
      kOperation, kMaxHeader, text.size());
  std::string start;
  for (std::size_t i = 0; i < kSafetensorsLengthBytes; ++i) {
    start += static_cast<char>((std::uint64_t{text.size()} >> (8 * i)) & 0xff);
  }
  return start + text;
}

}  // namespace ragged::plan
