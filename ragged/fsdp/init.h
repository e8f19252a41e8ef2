// Initial values as a pure function of (seed, name, element index): any world size and any layout starts with the
// same bits, and no rank ever holds the whole model.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "ragged/base/math.h"
#include "ragged/layout/interval.h"

namespace ragged::fsdp {

/// How one parameter starts.
struct InitRule {
  enum class Kind { kConstant, kNormal, kUniform };
  Kind kind = Kind::kConstant;
  double a = 0.0;  // the constant; the mean; the lower end
  double b = 0.0;  // unused; the standard deviation; the upper end
};

InitRule constant(double value);
InitRule normal(double mean, double stddev);
InitRule uniform(double low, double high);

/// From a parameter's fully qualified name and global shape; must answer alike on all ranks.
using InitFn = std::function<InitRule(const std::string& name, std::span<const Index> shape)>;

/// Writes the values of the elements in `interval` of the tensor `name` to `out` (interval.size() floats).
/// Philox4x32-10 (Salmon et al., SC 2011) in counter mode over the element index; normals by Box-Muller in double.
void fill_initial_values(
    const InitRule& rule, std::uint64_t seed, const std::string& name, layout::Interval interval, float* out);

}  // namespace ragged::fsdp
