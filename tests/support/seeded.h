// Random test instances that are the same on every machine, which std's distributions aren't.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "ragged/base/math.h"

namespace ragged::testing {

class Seeded {
 public:
  explicit Seeded(std::uint64_t seed) : engine_(seed) {}

  /// low <= result <= high.
  Index between(Index low, Index high) {
    const auto count = static_cast<std::uint64_t>(high - low + 1);
    return low + static_cast<Index>(engine_() % count);
  }
  /// True once in `n` times on average.
  bool one_in(Index n) { return between(1, n) == 1; }
  template <class T>
  const T& pick(const std::vector<T>& choices) {
    return choices[static_cast<std::size_t>(between(0, static_cast<Index>(choices.size()) - 1))];
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace ragged::testing
