// The learning rate as a pure function of the step: linear warm-up, then a half cosine.
#pragma once

#include "ragged/base/math.h"

namespace ragged::train {

struct ScheduleOptions {
  double peak = 1e-3;
  double min_ratio = 0.1;  // of the last step's rate to the peak
  Index warmup = 0;        // steps; the last of them is the first at the peak
  Index steps = 1;
};

/// Rate of step 0 .. steps-1. Warm-up never gives 0: step s has (s + 1) / warmup of the peak. The
/// last step has exactly min_ratio of it, unless warm-up takes all the steps. Later steps keep the
/// last one's rate.
double learning_rate(const ScheduleOptions& options, Index step);

}  // namespace ragged::train
