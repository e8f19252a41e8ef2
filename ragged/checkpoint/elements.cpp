#include "ragged/checkpoint/elements.h"

#include <bit>
#include <cstdint>
#include <cstring>

#include "ragged/base/error.h"

namespace ragged::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are read as they lie");

constexpr std::uint32_t kInfinity = 0x7f800000u;

float from_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > kInfinity) {  // NaN: the upper half, with some bit left in it
    const auto upper = static_cast<std::uint16_t>(bits >> 16);
    return (upper & 0x7fu) != 0 ? upper : static_cast<std::uint16_t>(upper | 0x40u);
  }
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float from_fp16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu;
  const std::uint32_t fraction = bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | kInfinity | (fraction << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
  // Subnormal: fraction * 2^-24.
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

std::uint16_t to_fp16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > kInfinity) {
    const std::uint32_t fraction = (magnitude >> 13) & 0x3ffu;
    return static_cast<std::uint16_t>(sign | 0x7c00u | (fraction != 0 ? fraction : 0x200u));
  }
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and more
  if (magnitude < 0x38800000u) {
    // Below the smallest normal number. Adding 0.5 leaves units of 2^-24 in the last places, rounded as fp32 rounds.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

template <class Stored, class Convert>
void decode(Bytes bytes, std::span<float> values, Convert convert) {
  RAGGED_ASSERT(bytes.size() == values.size() * sizeof(Stored), "{} bytes for {}", bytes.size(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    Stored stored;
    std::memcpy(&stored, bytes.data() + i * sizeof(Stored), sizeof(Stored));
    values[i] = convert(stored);
  }
}

template <class Stored, class Convert>
void encode(std::span<const float> values, std::span<std::byte> bytes, Convert convert) {
  RAGGED_ASSERT(bytes.size() == values.size() * sizeof(Stored), "{} bytes for {}", bytes.size(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Stored stored = convert(values[i]);
    std::memcpy(bytes.data() + i * sizeof(Stored), &stored, sizeof(Stored));
  }
}

[[noreturn]] void refuse(std::string_view dtype) {
  throw InvalidArgument(fmt::format("[checkpoint] Expected dtype F32, BF16 or F16, but got '{}'.", dtype));
}

}  // namespace

bool has_float_elements(std::string_view dtype) {
  return dtype == "F32" || dtype == "BF16" || dtype == "F16";
}

void decode_elements(std::string_view dtype, Bytes bytes, std::span<float> values) {
  if (dtype == "F32") {
    RAGGED_ASSERT(bytes.size() == values.size_bytes(), "{} bytes for {}", bytes.size(), values.size());
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  } else if (dtype == "BF16") {
    decode<std::uint16_t>(bytes, values, from_bf16);
  } else if (dtype == "F16") {
    decode<std::uint16_t>(bytes, values, from_fp16);
  } else {
    refuse(dtype);
  }
}

void encode_elements(std::string_view dtype, std::span<const float> values, std::span<std::byte> bytes) {
  if (dtype == "F32") {
    RAGGED_ASSERT(bytes.size() == values.size_bytes(), "{} bytes for {}", bytes.size(), values.size());
    if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  } else if (dtype == "BF16") {
    encode<std::uint16_t>(values, bytes, to_bf16);
  } else if (dtype == "F16") {
    encode<std::uint16_t>(values, bytes, to_fp16);
  } else {
    refuse(dtype);
  }
}

}  // namespace ragged::checkpoint
