#include "ragged/base/math.h"

#include <array>
#include <vector>

#include "tests/support/expect_error.h"

namespace ragged {
namespace {

constexpr Index kMax = std::numeric_limits<Index>::max();

TEST(Math, ceil_div_is_the_smallest_cover) {
  for (Index divisor = 1; divisor <= 13; ++divisor) {
    for (Index value = 0; value <= 60; ++value) {
      const Index q = ceil_div(value, divisor);
      EXPECT_GE(q * divisor, value);
      EXPECT_LT((q - 1) * divisor, value);
    }
  }
  EXPECT_EQ(ceil_div(kMax, 1), kMax);
  EXPECT_EQ(ceil_div(kMax, kMax), 1);
  EXPECT_EQ(ceil_div(kMax, 2), kMax / 2 + 1);
}

TEST(Math, round_up_is_the_next_multiple) {
  for (Index multiple = 1; multiple <= 13; ++multiple) {
    for (Index value = 0; value <= 60; ++value) {
      const Index rounded = round_up(value, multiple);
      EXPECT_EQ(rounded % multiple, 0);
      EXPECT_GE(rounded, value);
      EXPECT_LT(rounded, value + multiple);
    }
  }
}

TEST(Math, capped_lcm_is_the_least_common_multiple_up_to_the_cap) {
  constexpr Index kCap = 100;
  for (Index a = 1; a <= kCap; ++a) {
    for (Index b = 1; b <= kCap; ++b) {
      const Index exact = std::lcm(a, b);
      EXPECT_EQ(capped_lcm(a, b, kCap), exact <= kCap ? exact : kCap + 1) << a << ", " << b;
    }
  }
}

TEST(Math, capped_lcm_does_not_overflow) {
  EXPECT_EQ(capped_lcm(kMax - 1, kMax - 2, kMax - 1), kMax);
  EXPECT_EQ(capped_lcm(Index{1} << 40, (Index{1} << 40) - 1, Index{1} << 50), (Index{1} << 50) + 1);
}

TEST(Math, checked_product_multiplies) {
  EXPECT_EQ(checked_product({}), 1);
  EXPECT_EQ(checked_product(std::vector<Index>{7}), 7);
  EXPECT_EQ(checked_product(std::vector<Index>{2, 3, 5}), 30);
  EXPECT_EQ(checked_product(std::vector<Index>{kMax}), kMax);
}

TEST(Math, checked_product_of_an_empty_tensor_is_zero_however_large_its_other_sizes) {
  EXPECT_EQ(checked_product(std::vector<Index>{0}), 0);
  EXPECT_EQ(checked_product(std::vector<Index>{kMax, kMax, 0}), 0);
  EXPECT_EQ(checked_product(std::vector<Index>{0, kMax, kMax}), 0);
}

TEST(Math, checked_product_refuses_negative_sizes_and_overflow) {
  EXPECT_INVALID(checked_product(std::vector<Index>{2, -1}), "got -1");
  EXPECT_INVALID(checked_product(std::vector<Index>{0, -1}), "got -1");
  EXPECT_INVALID(checked_product(std::vector<Index>{kMax, 2}), "overflow");
  EXPECT_INVALID(checked_product(std::vector<Index>{Index{1} << 32, Index{1} << 32}), "overflow");
}

}  // namespace
}  // namespace ragged
