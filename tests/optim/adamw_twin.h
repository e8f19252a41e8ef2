// The slow, obvious AdamW: one element at a time, written from the paper and torch's documentation, sharing nothing
// with ragged/optim.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "ragged/base/math.h"

namespace ragged::test {

struct TwinOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

/// One parameter as a whole, with its own step count.
struct TwinParameter {
  std::vector<float> value;
  std::vector<float> exp_avg;
  std::vector<float> exp_avg_sq;
  int step = 0;
  bool decays = true;

  explicit TwinParameter(std::vector<float> initial, bool decay)
      : value(std::move(initial)), exp_avg(value.size(), 0.0F), exp_avg_sq(value.size(), 0.0F), decays(decay) {}

  /// `round`: what storing a moment does to it.
  void update(
      const TwinOptions& options, const std::vector<float>& grad,
      const std::function<float(float)>& round = [](float x) { return x; });
};

}  // namespace ragged::test
