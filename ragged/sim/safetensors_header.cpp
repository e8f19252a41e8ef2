#include "ragged/sim/safetensors_header.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>

#include "ragged/plan/json_reader.h"

namespace ragged::sim {
namespace {

using plan::detail::JsonNode;

constexpr std::string_view kOperation = "safetensors";
constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeader = 100'000'000;  // the format's limit
constexpr std::uint64_t kMaxIndex = 256 << 20;
constexpr int kMaxDepth = 8;  // both formats have three levels
constexpr std::size_t kMaxTensors = std::size_t{1} << 22;
constexpr std::size_t kMaxDims = 32;

// 0: a type that we don't know, whose bytes aren't checked.
Index bits_of(std::string_view dtype) {
  static const std::map<std::string_view, Index> kBits = {
      {"F64", 64},        {"I64", 64},    {"U64", 64},    {"C64", 64},    {"F32", 32},    {"I32", 32},
      {"U32", 32},        {"F16", 16},    {"BF16", 16},   {"I16", 16},    {"U16", 16},    {"I8", 8},
      {"U8", 8},          {"BOOL", 8},    {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
      {"F8_E5M2FNUZ", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4}};
  const auto found = kBits.find(dtype);
  return found == kBits.end() ? 0 : found->second;
}

struct Placed {
  StoredTensor tensor;
  Index begin = 0;
  Index end = 0;
};

// Their product with 64 bits still fits.
Index checked_numel(const StoredTensor& tensor, std::string_view source) {
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

Placed read_entry(const std::string& name, const nlohmann::ordered_json& json, std::string_view source) {
  const JsonNode node(json, std::string(source) + ": " + name, kOperation);
  Placed placed;
  placed.tensor.name = name;
  placed.tensor.dtype = node.member("dtype").string();
  const JsonNode shape = node.member("shape");
  RAGGED_CHECK(
      shape.array_size() <= kMaxDims, "[{}] Expected at most {} dims, but got {} ('{}', tensor '{}').", kOperation,
      kMaxDims, shape.array_size(), source, name);
  for (std::size_t d = 0; d < shape.array_size(); ++d) placed.tensor.shape.push_back(shape.element(d).integer());
  const JsonNode offsets = node.member("data_offsets");
  RAGGED_CHECK(
      offsets.array_size() == 2, "[{}] Expected two data_offsets, but got {} ('{}', tensor '{}').", kOperation,
      offsets.array_size(), source, name);
  placed.begin = offsets.element(0).integer();
  placed.end = offsets.element(1).integer();
  const Index bits = bits_of(placed.tensor.dtype);
  const Index expected = bits * checked_numel(placed.tensor, source) / 8;
  RAGGED_CHECK(
      placed.begin <= placed.end && (bits == 0 || placed.end - placed.begin == expected),
      "[{}] Expected {} bytes for the shape of '{}', but got data_offsets {} to {} ('{}'). The header is damaged.",
      kOperation, expected, name, placed.begin, placed.end, source);
  return placed;
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

std::uint64_t header_bytes(std::string_view start, std::uint64_t file_bytes, std::string_view source) {
  RAGGED_CHECK(
      start.size() >= kLengthBytes && file_bytes >= kLengthBytes,
      "[{}] Expected a file of at least {} bytes, but got {} ('{}'). It is truncated, or no safetensors file.",
      kOperation, kLengthBytes, std::min<std::uint64_t>(start.size(), file_bytes), source);
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length |= std::uint64_t{static_cast<unsigned char>(start[i])} << (8 * i);
  }
  RAGGED_CHECK(
      length <= kMaxHeader, "[{}] Expected a header of at most {} bytes, but got {} ('{}'). It is no safetensors file.",
      kOperation, kMaxHeader, length, source);
  RAGGED_CHECK(
      length <= file_bytes - kLengthBytes,
      "[{}] Expected a header of {} bytes, but the file has only {} ('{}'). It is truncated, or no safetensors file.",
      kOperation, length, file_bytes, source);
  return length;
}

}  // namespace

std::vector<StoredTensor> parse_safetensors(std::string_view start, std::uint64_t file_bytes, std::string_view source) {
  const std::uint64_t length = header_bytes(start, file_bytes, source);
  RAGGED_CHECK(
      start.size() - kLengthBytes >= length, "[{}] Expected a header of {} bytes, but could read only {} ('{}').",
      kOperation, length, start.size() - kLengthBytes, source);
  const std::string_view text = start.substr(kLengthBytes, length);
  nlohmann::ordered_json json;
  try {
    json = plan::detail::parse_json(text, kMaxDepth, kOperation);
  } catch (const InvalidArgument& error) {
    RAGGED_CHECK(false, "{} The header of '{}' is damaged.", error.what(), source);
  }
  RAGGED_CHECK(json.is_object(), "[{}] Expected a header of named tensors, but got none ('{}').", kOperation, source);
  RAGGED_CHECK(
      json.size() <= kMaxTensors, "[{}] Expected at most {} tensors, but got {} ('{}').", kOperation, kMaxTensors,
      json.size(), source);
  check_names(text, source);
  std::vector<Placed> placed;
  for (const auto& [name, value] : json.items()) {
    if (name != "__metadata__") placed.push_back(read_entry(name, value, source));
  }
  std::ranges::stable_sort(placed, {}, &Placed::begin);
  Index end = 0;
  std::vector<StoredTensor> tensors;
  for (Placed& one : placed) {
    RAGGED_CHECK(
        one.begin >= end, "[{}] Expected tensors in bytes of their own, but '{}' overlaps another ('{}').", kOperation,
        one.tensor.name, source);
    end = one.end;
    tensors.push_back(std::move(one.tensor));
  }
  const std::uint64_t data = file_bytes - kLengthBytes - length;
  RAGGED_CHECK(
      static_cast<std::uint64_t>(end) == data,
      "[{}] Expected {} bytes of data behind the header, but got {} ('{}'). The file is {}.", kOperation, end, data,
      source, static_cast<std::uint64_t>(end) > data ? "truncated" : "damaged");
  return tensors;
}

std::vector<StoredTensor> read_safetensors(const std::filesystem::path& file) {
  std::error_code error;
  const std::uint64_t bytes = std::filesystem::file_size(file, error);
  std::ifstream stream(file, std::ios::binary);
  RAGGED_CHECK(
      !error && stream, "[{}] Expected a file '{}', but there is none that can be read.", kOperation, file.string());
  std::string start(std::min(bytes, kLengthBytes), '\0');
  stream.read(start.data(), static_cast<std::streamsize>(start.size()));
  start.resize(static_cast<std::size_t>(std::max<std::streamsize>(0, stream.gcount())));
  const std::uint64_t length = header_bytes(start, bytes, file.string());
  start.resize(kLengthBytes + length);
  stream.read(start.data() + kLengthBytes, static_cast<std::streamsize>(length));
  start.resize(kLengthBytes + static_cast<std::size_t>(std::max<std::streamsize>(0, stream.gcount())));
  return parse_safetensors(start, bytes, file.string());
}

std::vector<StoredTensor> read_safetensors_index(const std::filesystem::path& index) {
  const nlohmann::ordered_json json =
      plan::detail::parse_json(read_text(index, kMaxIndex, kOperation), kMaxDepth, kOperation);
  RAGGED_CHECK(
      json.is_object() && json.contains("weight_map") && json["weight_map"].is_object(),
      "[{}] Expected an object 'weight_map', but got none ('{}').", kOperation, index.string());
  std::map<std::string, std::set<std::string>> files;  // file -> names that are still to be found
  for (const auto& [name, file] : json["weight_map"].items()) {
    const std::string beside = file.is_string() ? file.get<std::string>() : "";
    RAGGED_CHECK(
        !beside.empty() && std::filesystem::path(beside).filename() == beside,
        "[{}] Expected the name of a file beside the index, but got {} ('{}', tensor '{}').", kOperation, file.dump(),
        index.string(), name);
    files[beside].insert(name);
  }
  RAGGED_CHECK(
      !files.empty(), "[{}] Expected tensors in the 'weight_map', but got none ('{}').", kOperation, index.string());
  std::vector<StoredTensor> tensors;
  for (auto& [file, names] : files) {
    for (StoredTensor& tensor : read_safetensors(index.parent_path() / file)) {
      if (names.erase(tensor.name) > 0) tensors.push_back(std::move(tensor));
    }
    RAGGED_CHECK(
        names.empty(), "[{}] Expected tensor '{}' in '{}', where the index has it, but it isn't there ('{}').",
        kOperation, *names.begin(), file, index.string());
  }
  return tensors;
}

std::string read_text(const std::filesystem::path& file, std::uint64_t limit, std::string_view operation) {
  std::error_code error;
  const std::uint64_t bytes = std::filesystem::file_size(file, error);
  std::ifstream stream(file, std::ios::binary);
  RAGGED_CHECK(
      !error && stream, "[{}] Expected a file '{}', but there is none that can be read.", operation, file.string());
  RAGGED_CHECK(
      bytes <= limit, "[{}] Expected a file of at most {} bytes, but got {} ('{}').", operation, limit, bytes,
      file.string());
  std::string text(bytes, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(bytes));
  text.resize(static_cast<std::size_t>(std::max<std::streamsize>(0, stream.gcount())));
  return text;
}

}  // namespace ragged::sim
