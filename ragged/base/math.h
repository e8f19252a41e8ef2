// Integer arithmetic for sizes and offsets. `Index` counts elements unless a name says bytes.
#pragma once

#include <cstdint>
#include <limits>
#include <numeric>
#include <span>

#include "ragged/base/error.h"

namespace ragged {

using Index = std::int64_t;

/// Smallest q with q * divisor >= value; value >= 0, divisor > 0.
constexpr Index ceil_div(Index value, Index divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);  // doesn't overflow
}

/// Smallest multiple of `multiple` that is >= value; value >= 0, multiple > 0.
constexpr Index round_up(Index value, Index multiple) {
  return ceil_div(value, multiple) * multiple;
}

/// Least common multiple, or `cap` + 1 when it would exceed `cap`. Both factors > 0.
constexpr Index capped_lcm(Index a, Index b, Index cap) {
  const Index factor = b / std::gcd(a, b);
  return a > cap / factor ? cap + 1 : a * factor;
}

/// Product of the sizes; 1 for none. Throws InvalidArgument on a negative size or on overflow.
inline Index checked_product(std::span<const Index> sizes) {
  Index product = 1;
  bool has_zero = false;
  for (Index size : sizes) {
    RAGGED_CHECK(size >= 0, "[numel] Expected sizes >= 0, but got {}.", size);
    has_zero = has_zero || size == 0;
  }
  if (has_zero) return 0;
  for (Index size : sizes) {
    RAGGED_CHECK(
        product <= std::numeric_limits<Index>::max() / size,
        "[numel] Expected a tensor of fewer than 2^63 elements, but the sizes overflow.");
    product *= size;
  }
  return product;
}

}  // namespace ragged
