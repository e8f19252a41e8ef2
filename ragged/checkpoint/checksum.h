// The checksum of everything that a checkpoint holds: XXH3 with 64 bits. Finds damage, not forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace ragged::checkpoint {

using Bytes = std::span<const std::byte>;

inline Bytes as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::uint64_t checksum(Bytes bytes);

/// 16 digits, as in the files.
std::string to_hex(std::uint64_t value);
/// Throws CheckpointError, naming `place`, for anything but 16 lower-case digits.
std::uint64_t from_hex(std::string_view text, std::string_view place);

}  // namespace ragged::checkpoint
