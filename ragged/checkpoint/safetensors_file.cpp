#include "ragged/checkpoint/safetensors_file.h"

#include <algorithm>
#include <utility>

#include "ragged/checkpoint/check.h"

namespace ragged::checkpoint {
namespace {

std::string tensor_named(std::string_view name) {
  return fmt::format("tensor '{}'", name);
}

// The header with its length in front.
std::string read_start(const File& file) {
  const Index size = file.size();
  std::string start(static_cast<std::size_t>(std::min<Index>(size, plan::kSafetensorsLengthBytes)), '\0');
  file.read(0, std::as_writable_bytes(std::span(start)));
  const std::uint64_t length =
      plan::safetensors_header_bytes(start, static_cast<std::uint64_t>(size), file.path().string());
  start.resize(plan::kSafetensorsLengthBytes + length);
  file.read(0, std::as_writable_bytes(std::span(start)));
  return start;
}

}  // namespace

std::vector<plan::SafetensorsEntry> lay_out(std::vector<plan::SafetensorsEntry> tensors) {
  for (const plan::SafetensorsEntry& entry : tensors) {
    const Index bits = plan::safetensors_bits(entry.dtype);
    RAGGED_CHECK(
        bits > 0 && bits % 8 == 0, "[safetensors] Expected a dtype of whole bytes, but got '{}' (tensor '{}').",
        entry.dtype, entry.name);
  }
  std::ranges::stable_sort(tensors, std::ranges::greater{}, [](const plan::SafetensorsEntry& entry) {
    return plan::safetensors_bits(entry.dtype);
  });
  Index end = 0;
  for (plan::SafetensorsEntry& entry : tensors) {
    entry.begin = end;
    end += checked_product(entry.shape) * (plan::safetensors_bits(entry.dtype) / 8);
    entry.end = end;
  }
  return tensors;
}

SafetensorsWriter::SafetensorsWriter(
    const std::filesystem::path& path, std::vector<plan::SafetensorsEntry> tensors,
    const std::map<std::string, std::string>& metadata)
    : file_(File::create(path)), tensors_(std::move(tensors)) {
  const std::string header = plan::write_safetensors_header(tensors_, metadata);
  header_bytes_ = static_cast<Index>(header.size());
  header_checksum_ = checksum(as_bytes(header));
  file_.write(0, as_bytes(header), "header");
}

void SafetensorsWriter::write(std::size_t tensor, Bytes bytes) const {
  const plan::SafetensorsEntry& entry = tensors_.at(tensor);
  RAGGED_ASSERT(
      static_cast<Index>(bytes.size()) == entry.end - entry.begin, "{} bytes for {} of '{}'", bytes.size(),
      entry.end - entry.begin, entry.name);
  file_.write(header_bytes_ + entry.begin, bytes, tensor_named(entry.name));
}

void SafetensorsWriter::write_part(std::size_t tensor, Index offset, Bytes bytes) const {
  const plan::SafetensorsEntry& entry = tensors_.at(tensor);
  RAGGED_ASSERT(
      offset >= 0 && static_cast<Index>(bytes.size()) <= entry.end - entry.begin - offset, "{} bytes at {} of '{}'",
      bytes.size(), offset, entry.name);
  file_.write(header_bytes_ + entry.begin + offset, bytes, tensor_named(entry.name));
}

Index SafetensorsWriter::file_bytes() const {
  return header_bytes_ + (tensors_.empty() ? 0 : tensors_.back().end);
}

SafetensorsReader::SafetensorsReader(const std::filesystem::path& path) : file_(File::open(path)) {
  try {
    const std::string start = read_start(file_);
    header_checksum_ = checksum(as_bytes(start));
    header_ = plan::parse_safetensors_header(start, static_cast<std::uint64_t>(file_.size()), path.string());
  } catch (const InvalidArgument& error) {
    throw CheckpointError(error.what());
  }
}

void SafetensorsReader::read(const plan::SafetensorsEntry& tensor, Index offset, std::span<std::byte> bytes) const {
  RAGGED_ASSERT(
      offset >= 0 && offset + static_cast<Index>(bytes.size()) <= tensor.end - tensor.begin, "read beyond '{}' of '{}'",
      tensor.name, file_.path().string());
  file_.read(header_bytes() + tensor.begin + offset, bytes, tensor_named(tensor.name));
}

}  // namespace ragged::checkpoint
