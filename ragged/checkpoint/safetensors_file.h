// One safetensors file, written at known places and read by tensor. The header is complete before the first value is
// written, so values stream; readers trust nothing that the header says before it has been checked.
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ragged/checkpoint/file.h"
#include "ragged/plan/safetensors_header.h"

namespace ragged::checkpoint {

/// Gives tensors their bytes: largest elements first, so that each lies at a multiple of its element's size, else in
/// the given order. `begin` and `end` of the arguments are ignored. Throws InvalidArgument for a dtype that we don't
/// know.
std::vector<plan::SafetensorsEntry> lay_out(std::vector<plan::SafetensorsEntry> tensors);

class SafetensorsWriter {
 public:
  /// Writes the header. `tensors` as lay_out() returns them.
  SafetensorsWriter(
      const std::filesystem::path& path, std::vector<plan::SafetensorsEntry> tensors,
      const std::map<std::string, std::string>& metadata);

  const std::vector<plan::SafetensorsEntry>& tensors() const { return tensors_; }
  /// Of a tensor's first byte in the file.
  Index file_offset(std::size_t tensor) const { return header_bytes_ + tensors_.at(tensor).begin; }
  /// All bytes of a tensor. In any order, each once.
  void write(std::size_t tensor, Bytes bytes) const;
  /// Bytes of a tensor from `offset` on. In any order, together all of them once.
  void write_part(std::size_t tensor, Index offset, Bytes bytes) const;
  /// Syncs and closes. The caller has written every tensor.
  void finish() { file_.sync_and_close(); }

  Index header_bytes() const { return header_bytes_; }  // its length included
  std::uint64_t header_checksum() const { return header_checksum_; }
  Index file_bytes() const;

 private:
  File file_;
  std::vector<plan::SafetensorsEntry> tensors_;
  Index header_bytes_ = 0;
  std::uint64_t header_checksum_ = 0;
};

class SafetensorsReader {
 public:
  /// Reads and checks the header. Throws CheckpointError that names the file.
  explicit SafetensorsReader(const std::filesystem::path& path);

  const std::vector<plan::SafetensorsEntry>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  Index header_bytes() const { return static_cast<Index>(header_.data_offset); }
  std::uint64_t header_checksum() const { return header_checksum_; }
  /// Bytes of the tensor from `offset` on.
  void read(const plan::SafetensorsEntry& tensor, Index offset, std::span<std::byte> bytes) const;

 private:
  File file_;
  plan::SafetensorsHeader header_;
  std::uint64_t header_checksum_ = 0;
};

}  // namespace ragged::checkpoint
