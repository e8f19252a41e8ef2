#include "ragged/checkpoint/checksum.h"

#include <utility>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "ragged/checkpoint/check.h"

namespace ragged::checkpoint {

void detail::throw_checkpoint_error(std::string message) {
  throw CheckpointError(std::move(message));
}

std::uint64_t checksum(Bytes bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::string to_hex(std::uint64_t value) {
  return fmt::format("{:016x}", value);
}

std::uint64_t from_hex(std::string_view text, std::string_view place) {
  std::uint64_t value = 0;
  bool is_hex = text.size() == 16;
  for (char c : text) {
    const bool is_digit = c >= '0' && c <= '9';
    is_hex = is_hex && (is_digit || (c >= 'a' && c <= 'f'));
    value = value << 4 | static_cast<std::uint64_t>(is_digit ? c - '0' : c - 'a' + 10) % 16;
  }
  RAGGED_CHECKPOINT_CHECK(is_hex, "[checkpoint] Expected a checksum of 16 digits, but got '{}' ({}).", text, place);
  return value;
}

}  // namespace ragged::checkpoint
