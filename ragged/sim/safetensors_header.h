// Names, dtypes and shapes from safetensors files, out of their headers alone: no weights are read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "ragged/base/math.h"

namespace ragged::sim {

struct StoredTensor {
  std::string name{};
  std::string dtype{};  // as in the file: "BF16"
  std::vector<Index> shape{};

  friend bool operator==(const StoredTensor&, const StoredTensor&) = default;
};

/// Tensors in the order of their bytes. `start` is the file's beginning with at least its header, `file_bytes` the
/// whole file's size. Throws InvalidArgument that names `source` for anything that isn't a safetensors file: a header
/// longer than the file (or than 100 MB, the format's own limit), bad JSON, names that occur twice, shapes that don't
/// fill their bytes, bytes that overlap, leave holes or end before or behind the file's end.
std::vector<StoredTensor> parse_safetensors(std::string_view start, std::uint64_t file_bytes, std::string_view source);

/// The same from a file; reads its header only. Throws InvalidArgument where there is no such file.
std::vector<StoredTensor> read_safetensors(const std::filesystem::path& file);

/// From an index ("model.safetensors.index.json") and the files beside it that it names.
std::vector<StoredTensor> read_safetensors_index(const std::filesystem::path& index);

/// A whole small file; throws InvalidArgument, with `operation`, where it is missing or larger than `limit` bytes.
std::string read_text(const std::filesystem::path& file, std::uint64_t limit, std::string_view operation);

}  // namespace ragged::sim
