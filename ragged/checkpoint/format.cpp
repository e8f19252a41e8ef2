#include "ragged/checkpoint/format.h"

#include <cmath>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "ragged/checkpoint/check.h"
#include "ragged/checkpoint/checksum.h"
#include "ragged/plan/json_reader.h"
#include "ragged/plan/safetensors_header.h"

namespace ragged::checkpoint {
namespace {

using Json = nlohmann::ordered_json;
using plan::detail::JsonNode;

constexpr std::string_view kOperation = "checkpoint";
constexpr std::string_view kFormatName = "ragged-checkpoint";
constexpr int kMaxDepth = 12;
constexpr Index kMaxRanks = Index{1} << 20;
constexpr Index kMaxChunk = Index{1} << 30;
constexpr std::size_t kMaxDims = 32;

// --- the envelope: {"checksum":"0123456789abcdef","content":...} ---

constexpr std::string_view kBefore = "{\"checksum\":\"";
constexpr std::string_view kBetween = "\",\"content\":";
constexpr std::string_view kBehind = "}\n";
constexpr std::size_t kDigits = 16;

std::string seal(const Json& content) {
  std::string text;
  try {
    text = content.dump();
  } catch (const Json::exception& error) {
    RAGGED_CHECK(false, "[{}] Expected names and texts in UTF-8, but got an error: {}", kOperation, error.what());
  }
  return fmt::format("{}{}{}{}{}", kBefore, to_hex(checksum(as_bytes(text))), kBetween, text, kBehind);
}

// Every byte of the file counts, those around the content too.
std::string_view unseal(std::string_view text, std::string_view source) {
  constexpr std::size_t kStart = kBefore.size() + kDigits + kBetween.size();
  const bool has_envelope = text.size() >= kStart + kBehind.size() && text.starts_with(kBefore) &&
      text.substr(kBefore.size() + kDigits).starts_with(kBetween) && text.ends_with(kBehind);
  RAGGED_CHECKPOINT_CHECK(
      has_envelope, "[{}] Expected a file that begins with its checksum, but '{}' doesn't. It is damaged or truncated.",
      kOperation, source);
  const std::string_view content = text.substr(kStart, text.size() - kStart - kBehind.size());
  const std::uint64_t expected = from_hex(text.substr(kBefore.size(), kDigits), source);
  const std::uint64_t found = checksum(as_bytes(content));
  RAGGED_CHECKPOINT_CHECK(
      found == expected, "[{}] Expected checksum {}, but got {} ('{}'). The file is damaged.", kOperation,
      to_hex(expected), to_hex(found), source);
  return content;
}

// --- writing ---

Json to_object(const Facts& facts) {
  for (const auto& [name, value] : facts.numbers) {
    RAGGED_CHECK(
        std::isfinite(value), "[{}] Expected finite numbers, but got {} (fact '{}').", kOperation, value, name);
  }
  return {{"texts", facts.texts}, {"integers", facts.integers}, {"numbers", facts.numbers}};
}

Json hex_list(const std::vector<std::uint64_t>& values) {
  Json list = Json::array();
  for (std::uint64_t value : values) list.push_back(to_hex(value));
  return list;
}

// --- reading ---

std::vector<Index> read_indices(const JsonNode& node) {
  RAGGED_CHECK(
      node.array_size() <= kMaxDims, "[{}] Expected at most {} dims at {}, but got {}.", kOperation, kMaxDims,
      node.path(), node.array_size());
  std::vector<Index> values;
  for (std::size_t i = 0; i < node.array_size(); ++i) values.push_back(node.element(i).integer());
  return values;
}

std::vector<std::uint64_t> read_hex_list(const JsonNode& node) {
  std::vector<std::uint64_t> values;
  for (std::size_t i = 0; i < node.array_size(); ++i) {
    const JsonNode item = node.element(i);
    values.push_back(from_hex(item.string(), item.path()));
  }
  return values;
}

std::map<std::string, std::string> read_texts(const Json& json, const std::string& path) {
  std::map<std::string, std::string> texts;
  RAGGED_CHECK(json.is_object(), "[{}] Expected an object at {}.", kOperation, path);
  for (const auto& [name, value] : json.items()) {
    texts[name] = JsonNode(value, path + "." + name, kOperation).string();
  }
  return texts;
}

Facts read_facts(const Json& json, const std::string& path) {
  const JsonNode node(json, path, kOperation);
  node.expect_object(3);
  static_cast<void>(node.member("texts"));
  static_cast<void>(node.member("integers"));
  static_cast<void>(node.member("numbers"));
  Facts facts;
  facts.texts = read_texts(json["texts"], path + ".texts");
  for (const auto& [name, value] : json["integers"].items()) {
    facts.integers[name] =
        JsonNode(value, path + ".integers." + name, kOperation).integer(std::numeric_limits<Index>::min());
  }
  for (const auto& [name, value] : json["numbers"].items()) {
    RAGGED_CHECK(value.is_number(), "[{}] Expected a number at {}.numbers.{}.", kOperation, path, name);
    facts.numbers[name] = value.get<double>();
  }
  return facts;
}

TensorInfo read_tensor(const JsonNode& node) {
  TensorInfo info;
  info.name = node.member("name").string();
  info.dtype = node.member("dtype").string();
  info.shape = read_indices(node.member("shape"));
  info.format = node.member("format").string();
  info.placement = node.member("placement").string();
  const Index bytes = dtype_bytes(info.dtype);
  RAGGED_CHECK(
      checked_product(info.shape) <= (Index{1} << 56) / bytes, "[{}] Expected a tensor of at most 2^56 bytes at {}.",
      kOperation, node.path());
  return info;
}

CheckpointIndex read_index(std::string_view content, std::string_view source) {
  const Json json = plan::detail::parse_json(content, kMaxDepth, kOperation);
  const JsonNode node(json, std::string(source), kOperation);
  const std::string format = node.member("format").string();
  const Index version = node.member("version").integer();
  RAGGED_CHECK(
      format == kFormatName && version == kFormatVersion,
      "[{}] Expected {} of version {}, but got '{}' of version {}. It was written by another release.", kOperation,
      kFormatName, kFormatVersion, format, version);
  CheckpointIndex index;
  index.step = node.member("step").integer();
  index.world_size = static_cast<int>(node.member("world_size").integer(1, kMaxRanks));
  index.chunk_bytes = node.member("chunk_bytes").integer(1, kMaxChunk);
  index.manifest_checksums = read_hex_list(node.member("manifest_checksums"));
  RAGGED_CHECK(
      index.manifest_checksums.size() == static_cast<std::size_t>(index.world_size),
      "[{}] Expected a checksum for each of {} ranks, but got {}.", kOperation, index.world_size,
      index.manifest_checksums.size());
  const JsonNode tensors = node.member("tensors");
  std::set<std::string> names;
  for (std::size_t i = 0; i < tensors.array_size(); ++i) {
    index.tensors.push_back(read_tensor(tensors.element(i)));
    RAGGED_CHECK(
        names.insert(index.tensors.back().name).second, "[{}] Expected each tensor once, but got '{}' twice.",
        kOperation, index.tensors.back().name);
  }
  static_cast<void>(node.member("facts"));
  index.facts = read_facts(json["facts"], std::string(source) + ".facts");
  return index;
}

void check_box(const layout::Box& box, const TensorInfo& info, const std::string& path) {
  bool is_inside = box.offset.size() == info.shape.size() && box.size.size() == info.shape.size();
  for (std::size_t d = 0; is_inside && d < info.shape.size(); ++d) {
    is_inside = box.size[d] <= info.shape[d] && box.offset[d] <= info.shape[d] - box.size[d];
  }
  RAGGED_CHECK(is_inside, "[{}] Expected a box inside tensor '{}' at {}.", kOperation, info.name, path);
}

StoredPiece read_piece(
    const JsonNode& node, const CheckpointIndex& index, const std::map<std::string_view, const TensorInfo*>& tensors,
    const StoredFile& file) {
  StoredPiece piece;
  piece.tensor = node.member("tensor").string();
  const auto info = tensors.find(piece.tensor);
  RAGGED_CHECK(
      info != tensors.end(), "[{}] Expected a tensor of {} at {}, but got '{}'.", kOperation, kIndexFile, node.path(),
      piece.tensor);
  piece.box = {read_indices(node.member("offset")), read_indices(node.member("size"))};
  check_box(piece.box, *info->second, node.path());
  piece.begin = node.member("begin").integer(file.header_bytes, file.bytes);
  piece.checksums = read_hex_list(node.member("checksums"));
  const Index bytes = piece.box.numel() * dtype_bytes(info->second->dtype);
  RAGGED_CHECK(
      bytes <= file.bytes - piece.begin &&
          static_cast<Index>(piece.checksums.size()) == ceil_div(bytes, index.chunk_bytes),
      "[{}] Expected {} bytes of tensor '{}' and a checksum for each {} in a file of {} bytes at {}.", kOperation,
      bytes, piece.tensor, index.chunk_bytes, file.bytes, node.path());
  return piece;
}

Manifest read_manifest(std::string_view content, const CheckpointIndex& index, int rank, std::string_view source) {
  const Json json = plan::detail::parse_json(content, kMaxDepth, kOperation);
  const JsonNode node(json, std::string(source), kOperation);
  std::map<std::string_view, const TensorInfo*> tensors;
  for (const TensorInfo& info : index.tensors) tensors[info.name] = &info;
  const JsonNode files = node.member("files");
  const auto parts = static_cast<int>(files.array_size());
  Manifest manifest;
  for (int part = 0; part < parts; ++part) {
    const JsonNode file = files.element(static_cast<std::size_t>(part));
    StoredFile stored;
    stored.name = file.member("name").string();
    // Not any name: a reader must not be led out of the folder.
    RAGGED_CHECK(
        stored.name == shard_name(rank, part, parts), "[{}] Expected file '{}' at {}, but got '{}'.", kOperation,
        shard_name(rank, part, parts), file.path(), stored.name);
    stored.bytes = file.member("bytes").integer();
    stored.header_bytes = file.member("header_bytes").integer(0, stored.bytes);
    stored.header_checksum = from_hex(file.member("header_checksum").string(), file.path());
    const JsonNode pieces = file.member("pieces");
    for (std::size_t i = 0; i < pieces.array_size(); ++i) {
      stored.pieces.push_back(read_piece(pieces.element(i), index, tensors, stored));
    }
    manifest.files.push_back(std::move(stored));
  }
  static_cast<void>(node.member("texts"));
  manifest.texts = read_texts(json["texts"], std::string(source) + ".texts");
  return manifest;
}

// What is said of JSON is said of a checkpoint here.
template <class Read>
auto translated(std::string_view source, const Read& read) {
  try {
    return read();
  } catch (const InvalidArgument& error) {
    throw CheckpointError(fmt::format("{} The file '{}' is damaged.", error.what(), source));
  }
}

}  // namespace

std::string manifest_name(int rank) {
  return fmt::format("shard-{:05}.json", rank + 1);
}

std::string shard_name(int rank, int part, int parts) {
  return fmt::format("shard-{:05}-model-{:05}-of-{:05}.safetensors", rank + 1, part + 1, parts);
}

Index dtype_bytes(std::string_view dtype) {
  const Index bits = plan::safetensors_bits(dtype);
  RAGGED_CHECK(bits > 0 && bits % 8 == 0, "[{}] Expected a dtype of whole bytes, but got '{}'.", kOperation, dtype);
  return bits / 8;
}

std::string to_json(const CheckpointIndex& index) {
  Json tensors = Json::array();
  for (const TensorInfo& info : index.tensors) {
    tensors.push_back(
        {{"name", info.name},
         {"dtype", info.dtype},
         {"shape", info.shape},
         {"format", info.format},
         {"placement", info.placement}});
  }
  return seal(
      {{"format", kFormatName},
       {"version", kFormatVersion},
       {"step", index.step},
       {"world_size", index.world_size},
       {"chunk_bytes", index.chunk_bytes},
       {"tensors", std::move(tensors)},
       {"manifest_checksums", hex_list(index.manifest_checksums)},
       {"facts", to_object(index.facts)}});
}

std::string to_json(const Manifest& manifest) {
  Json files = Json::array();
  for (const StoredFile& file : manifest.files) {
    Json pieces = Json::array();
    for (const StoredPiece& piece : file.pieces) {
      pieces.push_back(
          {{"tensor", piece.tensor},
           {"offset", piece.box.offset},
           {"size", piece.box.size},
           {"begin", piece.begin},
           {"checksums", hex_list(piece.checksums)}});
    }
    files.push_back(
        {{"name", file.name},
         {"bytes", file.bytes},
         {"header_bytes", file.header_bytes},
         {"header_checksum", to_hex(file.header_checksum)},
         {"pieces", std::move(pieces)}});
  }
  Json content = Json::object();
  content["files"] = std::move(files);
  content["texts"] = manifest.texts;
  return seal(content);
}

CheckpointIndex index_from_json(std::string_view text, std::string_view source) {
  const std::string_view content = unseal(text, source);
  return translated(source, [&] { return read_index(content, source); });
}

Manifest manifest_from_json(std::string_view text, const CheckpointIndex& index, int rank, std::string_view source) {
  const std::string_view content = unseal(text, source);
  return translated(source, [&] { return read_manifest(content, index, rank, source); });
}

}  // namespace ragged::checkpoint
