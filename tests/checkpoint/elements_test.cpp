// Conversions against a slow twin: all values of the smaller type in a list, and the nearest one looked up.
#include "ragged/checkpoint/elements.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "tests/support/expect_error.h"

namespace ragged::checkpoint {
namespace {

// A value by its definition: sign, exponent, fraction.
double value_of(std::uint16_t bits, int exponent_bits) {
  const int fraction_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  const int exponent = (bits & 0x7fff) >> fraction_bits;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  if (exponent == (1 << exponent_bits) - 1) return fraction == 0 ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
}

int exponent_bits_of(const std::string& dtype) {
  return dtype == "BF16" ? 8 : 5;
}

float decoded(const std::string& dtype, std::uint16_t bits) {
  float value = 0;
  decode_elements(dtype, std::as_bytes(std::span(&bits, 1)), std::span(&value, 1));
  return value;
}

std::uint16_t encoded(const std::string& dtype, float value) {
  std::uint16_t bits = 0;
  encode_elements(dtype, std::span(&value, 1), std::as_writable_bytes(std::span(&bits, 1)));
  return bits;
}

// Of all magnitudes in order the nearest, the even one of two; the first number beyond the finite ones is infinity's.
std::uint16_t nearest(const std::string& dtype, float value) {
  static const auto magnitudes = [](int exponent_bits) {
    std::vector<double> values;
    for (std::uint16_t bits = 0; std::isfinite(value_of(bits, exponent_bits)); ++bits) {
      values.push_back(value_of(bits, exponent_bits));
    }
    values.push_back(2 * values.back() - values[values.size() - 2]);
    return values;
  };
  static const std::vector<double> bf16 = magnitudes(8);
  static const std::vector<double> fp16 = magnitudes(5);
  const std::vector<double>& values = dtype == "BF16" ? bf16 : fp16;
  const double magnitude = std::fabs(static_cast<double>(value));
  std::size_t above =
      static_cast<std::size_t>(std::lower_bound(values.begin(), values.end(), magnitude) - values.begin());
  above = std::min(above, values.size() - 1);
  std::size_t best = above;
  if (above > 0 && magnitude < values[above]) {
    const double up = values[above] - magnitude;
    const double down = magnitude - values[above - 1];
    if (down < up || (down == up && above % 2 == 1)) best = above - 1;
  }
  return static_cast<std::uint16_t>(best | (std::signbit(value) ? 0x8000 : 0));
}

TEST(Elements, every_value_of_two_bytes_is_exact_and_comes_back) {
  for (const std::string dtype : {"BF16", "F16"}) {
    for (int i = 0; i < 0x10000; ++i) {
      const auto bits = static_cast<std::uint16_t>(i);
      const double expected = value_of(bits, exponent_bits_of(dtype));
      const float value = decoded(dtype, bits);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(value)) << dtype << " " << i;
      } else {
        ASSERT_EQ(static_cast<double>(value), expected) << dtype << " " << i;
        ASSERT_EQ(std::signbit(value), std::signbit(expected)) << dtype << " " << i;
      }
      ASSERT_EQ(encoded(dtype, value), bits) << dtype << " " << i;
    }
  }
}

TEST(Elements, rounds_to_nearest_even) {
  std::mt19937 random(1);
  for (const std::string dtype : {"BF16", "F16"}) {
    for (int i = 0; i < 300000; ++i) {
      auto bits = static_cast<std::uint32_t>(random());
      if (i % 3 == 0) bits = (bits & 0x807fffffu) | ((100u + bits % 45u) << 23);               // where fp16 lives
      if (i % 5 == 0) bits = (bits & ~0x1fffu) | (i % 2 == 0 ? 0x1000u : 0x0fffu);             // around ties of fp16
      if (i % 7 == 0) bits = (bits & ~0xffffu) | (i % 2 == 0 ? 0x8000u : 0x7fffu + bits % 3);  // and of bf16
      const auto value = std::bit_cast<float>(bits);
      if (std::isnan(value)) continue;
      ASSERT_EQ(encoded(dtype, value), nearest(dtype, value)) << dtype << " " << value;
    }
    EXPECT_EQ(decoded(dtype, encoded(dtype, INFINITY)), INFINITY);
    EXPECT_TRUE(std::isnan(decoded(dtype, encoded(dtype, NAN))));
    EXPECT_TRUE(std::isnan(decoded(dtype, encoded(dtype, std::bit_cast<float>(0x7f800001u)))));  // low bits alone
  }
  EXPECT_EQ(decoded("F16", encoded("F16", 65519.0F)), 65504.0F);
  EXPECT_EQ(decoded("F16", encoded("F16", 65520.0F)), INFINITY);
}

TEST(Elements, fp32_is_copied_and_others_are_refused) {
  const std::vector<float> values = {1.5F, -0.0F, NAN};
  std::vector<std::byte> bytes(12);
  encode_elements("F32", values, bytes);
  std::vector<float> back(3);
  decode_elements("F32", bytes, back);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(back[1]), 0x80000000u);
  EXPECT_TRUE(std::isnan(back[2]));
  decode_elements("F32", {}, {});
  for (const char* dtype : {"F64", "I64", "U8", "F8_E4M3", ""}) {
    EXPECT_FALSE(has_float_elements(dtype));
    EXPECT_INVALID(decode_elements(dtype, bytes, back), "BF16");
    EXPECT_INVALID(encode_elements(dtype, back, bytes), dtype);
  }
}

}  // namespace
}  // namespace ragged::checkpoint
