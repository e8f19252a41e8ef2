#include "ragged/train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace ragged::train {

double learning_rate(const ScheduleOptions& options, Index step) {
  if (step < options.warmup) {
    return options.peak * static_cast<double>(step + 1) / static_cast<double>(options.warmup);
  }
  const auto decay_steps = static_cast<double>(std::max<Index>(1, options.steps - options.warmup));
  const auto done = static_cast<double>(step - options.warmup + 1);
  const double progress = std::min(1.0, done / decay_steps);
  const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return options.peak * (options.min_ratio + (1.0 - options.min_ratio) * cosine);
}

}  // namespace ragged::train
