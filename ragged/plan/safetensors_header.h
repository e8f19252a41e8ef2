// The header of a safetensors file, read and written: which tensor lies in which bytes, and the strings that go with
// the file. Shared by readers of other people's models and by checkpoints; no weights are touched.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ragged/base/math.h"

namespace ragged::plan {

/// Bytes before the header that hold its length, little-endian.
inline constexpr std::uint64_t kSafetensorsLengthBytes = 8;

struct SafetensorsEntry {
  std::string name{};
  std::string dtype{};  // as in the file: "BF16"
  std::vector<Index> shape{};
  Index begin = 0;  // bytes, from the end of the header
  Index end = 0;

  friend bool operator==(const SafetensorsEntry&, const SafetensorsEntry&) = default;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors{};        // in the order of their bytes
  std::map<std::string, std::string> metadata{};  // "__metadata__"
  std::uint64_t data_offset = 0;                  // of the first tensor's bytes in the file
};

/// Bits of an element of this dtype name; 0 for one that we don't know.
Index safetensors_bits(std::string_view dtype);

/// Bytes of the header alone, from the first 8 bytes of a file of `file_bytes`. Throws InvalidArgument that names
/// `source` where the file is too short, or the length beyond the format's limit of 100 MB.
std::uint64_t safetensors_header_bytes(std::string_view start, std::uint64_t file_bytes, std::string_view source);

/// `start` is the file's beginning with at least its header, `file_bytes` the whole file's size. Throws
/// InvalidArgument that names `source` for anything that isn't a safetensors file: a header longer than the file (or
/// than 100 MB), bad JSON, names that occur twice, shapes that don't fill their bytes, bytes that overlap, leave a hole
/// between them, or don't end with the file.
SafetensorsHeader parse_safetensors_header(std::string_view start, std::uint64_t file_bytes, std::string_view source);

/// The beginning of a file, its length included, padded to a multiple of 8 bytes. Entries in the order of their bytes;
/// `begin` and `end` are taken as they are. Throws InvalidArgument for names that aren't UTF-8 or a header that is
/// beyond the limit.
std::string write_safetensors_header(
    const std::vector<SafetensorsEntry>& tensors, const std::map<std::string, std::string>& metadata);

}  // namespace ragged::plan
