// libFuzzer on the JSON files of a checkpoint: any bytes are one or a CheckpointError, and what is read lies where it
// says. tools/fuzz runs it. The fuzzer can't know checksums, so most inputs are sealed before they are read; the first
// byte says which of the two files an input is.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "ragged/checkpoint/checksum.h"
#include "ragged/checkpoint/format.h"

namespace {

using namespace ragged::checkpoint;  // NOLINT: the subject

CheckpointIndex some_index() {
  CheckpointIndex index{.world_size = 2, .chunk_bytes = 64};
  index.tensors = {{"w", "F32", {5, 4}, "", ""}, {"c", "U8", {3}, "power 32x32", ""}, {"s", "I64", {}, "", ""}};
  index.manifest_checksums = {1, 2};
  return index;
}

void require(bool condition) {
  if (!condition) __builtin_trap();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const int kind = data[0] % 8;
  std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (kind < 6) {
    text = fmt::format(
        "{{\"checksum\":\"{}\",\"content\":{}}}\n", to_hex(checksum(as_bytes(std::string_view(text)))), text);
  }
  try {
    if (kind % 2 == 0) {
      const CheckpointIndex index = index_from_json(text, "fuzz");
      require(index.manifest_checksums.size() == static_cast<std::size_t>(index.world_size));
      require(index_from_json(to_json(index), "again") == index);
    } else {
      const CheckpointIndex index = some_index();
      const Manifest manifest = manifest_from_json(text, index, 1, "fuzz");
      for (const StoredFile& file : manifest.files) {
        require(file.name.find('/') == std::string::npos);
        for (const StoredPiece& piece : file.pieces) {
          require(piece.begin >= file.header_bytes && piece.begin + piece.box.numel() <= file.bytes);
        }
      }
      require(manifest_from_json(to_json(manifest), index, 1, "again") == manifest);
    }
  } catch (const ragged::CheckpointError&) {
  }
  return 0;
}
