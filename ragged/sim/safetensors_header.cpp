#include "ragged/sim/safetensors_header.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include "ragged/base/error.h"
#include "ragged/plan/safetensors_header.h"
#include "ragged/plan/safetensors_index.h"

namespace ragged::sim {
namespace {

constexpr std::string_view kOperation = "safetensors";
constexpr std::uint64_t kMaxIndex = 256 << 20;

}  // namespace

std::vector<StoredTensor> parse_safetensors(std::string_view start, std::uint64_t file_bytes, std::string_view source) {
  std::vector<StoredTensor> tensors;
  for (plan::SafetensorsEntry& entry : plan::parse_safetensors_header(start, file_bytes, source).tensors) {
    tensors.push_back({std::move(entry.name), std::move(entry.dtype), std::move(entry.shape)});
  }
  return tensors;
}

std::vector<StoredTensor> read_safetensors(const std::filesystem::path& file) {
  std::error_code error;
  const std::uint64_t bytes = std::filesystem::file_size(file, error);
  std::ifstream stream(file, std::ios::binary);
  RAGGED_CHECK(
      !error && stream, "[{}] Expected a file '{}', but there is none that can be read.", kOperation, file.string());
  constexpr std::uint64_t kLength = plan::kSafetensorsLengthBytes;
  std::string start(std::min(bytes, kLength), '\0');
  stream.read(start.data(), static_cast<std::streamsize>(start.size()));
  start.resize(static_cast<std::size_t>(std::max<std::streamsize>(0, stream.gcount())));
  const std::uint64_t length = plan::safetensors_header_bytes(start, bytes, file.string());
  start.resize(kLength + length);
  stream.read(start.data() + kLength, static_cast<std::streamsize>(length));
  start.resize(kLength + static_cast<std::size_t>(std::max<std::streamsize>(0, stream.gcount())));
  return parse_safetensors(start, bytes, file.string());
}

std::vector<StoredTensor> read_safetensors_index(const std::filesystem::path& index) {
  std::map<std::string, std::set<std::string>> files;  // file -> names that are still to be found
  for (const auto& [name, file] :
       plan::parse_safetensors_index(read_text(index, kMaxIndex, kOperation), index.string())) {
    files[file].insert(name);
  }
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
