// The 8-bit formats: published maps, nearest entries, and what encoding and decoding may and may not change.
#include "ragged/optim/tile_codes.h"

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "tests/optim/adamw8bit_twin.h"
#include "tests/support/seeded.h"

namespace ragged::test {
namespace {

using optim::dynamic_tables;
using optim::DynamicCodes;
using optim::DynamicTables;
using optim::PowerCodes;

constexpr std::array<float, 8> kSample{0.5F, -1.25F, 0.001F, -3e-7F, 0.0F, 1.0F, -0.03F, 0.7F};
constexpr float kLargest = 1.25F;

DynamicCodes dynamic() {
  return {&dynamic_tables()};
}

TEST(DynamicMap, has_the_published_entries) {
  const DynamicTables& tables = dynamic_tables();
  const std::array<float, 256> first = published_map(true);
  const std::array<float, 256> second = published_map(false);
  double sums[4] = {};
  for (std::size_t i = 0; i < 256; ++i) {
    ASSERT_EQ(tables.first[i], first[i]) << i;
    ASSERT_EQ(tables.second[i], second[i]) << i;
    if (i > 0) {
      ASSERT_GT(tables.first[i], tables.first[i - 1]);
      ASSERT_GT(tables.second[i], tables.second[i - 1]);
    }
    sums[0] += double{tables.first[i]};
    sums[1] += double{tables.first[i]} * double{tables.first[i]};
    sums[2] += double{tables.second[i]};
    sums[3] += double{tables.second[i]} * double{tables.second[i]};
  }
  EXPECT_NEAR(sums[0], 1.0, 5e-10);
  EXPECT_NEAR(sums[1], 48.595837539, 5e-10);
  EXPECT_NEAR(sums[2], 75.105263181, 5e-10);
  EXPECT_NEAR(sums[3], 48.597451880, 5e-10);
}

TEST(DynamicMap, has_the_published_values_at_some_places) {
  const DynamicTables& tables = dynamic_tables();
  const std::vector<std::pair<int, float>> first{{0, -0.99296874F},     {1, -0.97890627F},  {64, -0.098593749F},
                                                 {126, -5.5000004e-7F}, {127, 0.0F},        {128, 5.5000004e-7F},
                                                 {131, 2.1249998e-5F},  {160, 0.01421875F}, {191, 0.10703126F},
                                                 {192, 0.12109375F},    {254, 0.99296874F}, {255, 1.0F}};
  for (const auto& [index, value] : first) EXPECT_FLOAT_EQ(tables.first[index], value) << index;
  const std::vector<std::pair<int, float>> second{{0, 0.0F},          {1, 3.2500003e-7F}, {31, 0.001140625F},
                                                  {63, 0.010703126F}, {64, 0.012109376F}, {126, 0.099296875F},
                                                  {127, 0.10351562F}, {160, 0.33554688F}, {191, 0.55351567F},
                                                  {254, 0.9964844F},  {255, 1.0F}};
  for (const auto& [index, value] : second) EXPECT_FLOAT_EQ(tables.second[index], value) << index;
}

TEST(DynamicCodes, encodes_the_sample) {
  const std::array<int, 8> first{212, 0, 141, 127, 127, 240, 91, 223};
  const std::array<int, 8> second{169, 255, 27, 1, 0, 226, 72, 192};
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(dynamic().encode_first(kSample[i], 1.0F / kLargest), first[i]) << i;
    EXPECT_EQ(dynamic().encode_second(std::fabs(kSample[i]), 1.0F / kLargest), second[i]) << i;
  }
  EXPECT_FLOAT_EQ(dynamic().decode_first(0, kLargest), -1.2412109F);  // the map has no -1
}

// All borders with their neighbours, a stride through all floats, and ends.
std::vector<float> magnitudes() {
  std::vector<float> values{0.0F, 1.0F, std::numeric_limits<float>::denorm_min()};
  for (const bool is_signed : {true, false}) {
    const std::array<float, 256> map = published_map(is_signed);
    for (std::size_t i = 0; i + 1 < map.size(); ++i) {
      const auto middle = static_cast<float>((double{map[i]} + double{map[i + 1]}) / 2.0);
      const float low = std::nextafter(std::fabs(middle), 0.0F);
      for (const float value :
           {std::fabs(middle), low, std::nextafter(low, 0.0F), std::nextafter(std::fabs(middle), 1.0F)}) {
        values.push_back(value);
      }
      values.push_back(std::fabs(map[i]));
    }
  }
  constexpr std::uint32_t kOne = 0x3F800000U;
  for (std::uint32_t bits = 1; bits < kOne; bits += 15013) {
    values.push_back(optim::float_of(bits));
  }
  return values;
}

TEST(DynamicCodes, finds_the_nearest_entry_and_the_lower_where_two_are_as_near) {
  const std::array<float, 256> first = published_map(true);
  const std::array<float, 256> second = published_map(false);
  for (const float value : magnitudes()) {
    ASSERT_EQ(dynamic().encode_first(value, 1.0F), nearest_entry(first, value)) << value;
    ASSERT_EQ(dynamic().encode_first(-value, 1.0F), nearest_entry(first, -value)) << -value;
    ASSERT_EQ(dynamic().encode_second(value, 1.0F), nearest_entry(second, value)) << value;
  }
  // A rounding above 1 is still 1.
  EXPECT_EQ(dynamic().encode_first(std::nextafter(1.0F, 2.0F), 1.0F), 255);
  EXPECT_EQ(dynamic().encode_first(-std::nextafter(1.0F, 2.0F), 1.0F), 0);
  EXPECT_EQ(dynamic().encode_second(std::nextafter(1.0F, 2.0F), 1.0F), 255);
}

TEST(PowerCodes, encodes_the_sample) {
  const PowerCodes codes;
  const std::array<int, 8> first{80, -127, 4, 0, 0, 114, -20, 95};
  const std::array<int, 8> second{203, 255, 43, 6, 0, 241, 100, 221};
  const std::array<float, 8> decoded{0.5020344F, 1.25F,      0.001010702F, 3.831372e-7F,
                                     0.0F,       0.9972808F, 0.02956305F,  0.7052099F};
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(codes.encode_first(kSample[i], codes.first_factor(kLargest)), first[i]) << i;
    const std::int32_t code = codes.encode_second(std::sqrt(std::fabs(kSample[i])), codes.second_factor(kLargest));
    EXPECT_EQ(code, second[i]) << i;
    EXPECT_NEAR(codes.decode_second(code, kLargest), decoded[i], 5e-7F * decoded[i]) << i;
  }
}

TEST(PowerCodes, come_back_from_decoding_with_the_same_bytes_and_scale) {
  const PowerCodes codes;
  testing::Seeded seeded(3);
  std::vector<float> scales{1.0F, 1.25F, 3e-5F, 0.7F, std::numeric_limits<float>::min(), 1e38F};
  for (int i = 0; i < 1000; ++i) {
    // Of all exponents whose fourth root of 1/255 is a normal number.
    const auto bits = static_cast<std::uint32_t>(seeded.between(0x10000000, 0x7E000000));
    scales.push_back(optim::float_of(bits));
  }
  for (const float scale : scales) {
    for (int k = -127; k <= 127; ++k) {
      const float value = codes.decode_first(k, scale);
      ASSERT_LE(std::fabs(value), scale);
      ASSERT_EQ(codes.encode_first(value, codes.first_factor(scale)), k) << scale;
    }
    EXPECT_EQ(codes.decode_first(127, scale), scale);
    EXPECT_EQ(codes.decode_second(255, scale), scale);
    if (scale < 1e-28F) continue;  // the small codes of a second moment this small are no normal numbers
    for (int k = 0; k <= 255; ++k) {
      const float value = codes.decode_second(k, scale);
      ASSERT_EQ(codes.encode_second(std::sqrt(value), codes.second_factor(scale)), k) << scale;
    }
  }
}

TEST(TileCodes, a_guarded_second_moment_above_zero_never_becomes_zero) {
  for (const float value : {1e-3F, 1e-12F, 1e-30F, 1e-38F}) {
    EXPECT_EQ(
        (optim::encode_second_guarded<DynamicCodes, true>(dynamic(), value, 1.0F)),
        std::max<int>(1, dynamic().encode_second(value, 1.0F)));
    EXPECT_GE((optim::encode_second_guarded<PowerCodes, true>({}, std::sqrt(value), 1.0F)), 1);
  }
  EXPECT_EQ((optim::encode_second_guarded<DynamicCodes, false>(dynamic(), 1e-12F, 1.0F)), 0);
  EXPECT_EQ((optim::encode_second_guarded<PowerCodes, true>({}, 0.0F, 1.0F)), 0);
  EXPECT_EQ((optim::encode_second_guarded<PowerCodes, true>({}, 1e-25F, 0.0F)), 0);  // the scale is 0
}

TEST(TileCodes, a_guarded_first_moment_is_zero_where_the_second_is) {
  const auto guarded = optim::decode_moments<PowerCodes, true>({}, 100, 0, 1.0F, 1.0F);
  EXPECT_EQ(guarded.first, 0.0F);
  EXPECT_GT((optim::decode_moments<PowerCodes, false>({}, 100, 0, 1.0F, 1.0F)).first, 0.5F);
  EXPECT_GT((optim::decode_moments<PowerCodes, true>({}, 100, 1, 1.0F, 1.0F)).first, 0.5F);
}

TEST(TileCodes, numbers_come_back_from_their_bytes) {
  for (int k = -127; k <= 127; ++k) {
    EXPECT_EQ(PowerCodes::first_number(static_cast<std::uint8_t>(k)), k);
    EXPECT_EQ(
        (optim::decode_moments<PowerCodes, false>({}, static_cast<std::uint8_t>(k), 9, 2.0F, 2.0F)).first,
        PowerCodes{}.decode_first(k, 2.0F));
  }
  for (int k = 0; k <= 255; ++k) {
    EXPECT_EQ(PowerCodes::second_number(static_cast<std::uint8_t>(k)), k);
    EXPECT_EQ(DynamicCodes::first_number(static_cast<std::uint8_t>(k)), k);
    EXPECT_EQ(DynamicCodes::second_number(static_cast<std::uint8_t>(k)), k);
  }
}

TEST(TileCodes, zero_is_a_code_of_every_moment) {
  const float scale = 3.0F;
  EXPECT_EQ(dynamic().decode_first(optim::zero_code(optim::TileFormat::kDynamic, true), scale), 0.0F);
  EXPECT_EQ(dynamic().decode_second(optim::zero_code(optim::TileFormat::kDynamic, false), scale), 0.0F);
  EXPECT_EQ(PowerCodes{}.decode_first(optim::zero_code(optim::TileFormat::kPower, true), scale), 0.0F);
  EXPECT_EQ(PowerCodes{}.decode_second(optim::zero_code(optim::TileFormat::kPower, false), scale), 0.0F);
}

TEST(TileCodes, rounds_half_to_even) {
  EXPECT_EQ(optim::round_half_even(0.5F), 0);
  EXPECT_EQ(optim::round_half_even(1.5F), 2);
  EXPECT_EQ(optim::round_half_even(2.5F), 2);
  EXPECT_EQ(optim::round_half_even(254.5F), 254);
  for (float value = 0.0F; value < 300.0F; value += 0.0625F) {
    ASSERT_EQ(optim::round_half_even(value), static_cast<std::int32_t>(std::nearbyint(value))) << value;
  }
}

}  // namespace
}  // namespace ragged::test
