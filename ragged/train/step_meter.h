// What a step has cost: time, time spent waiting, and bytes moved and held, from the counters of the units.
#pragma once

#include <chrono>

#include "ragged/fsdp/unit.h"
#include "ragged/train/metrics.h"

namespace ragged::train {

/// Made before a step, asked after it. Resets the peaks.
class StepMeter {
 public:
  explicit StepMeter(fsdp::Unit& root);

  double seconds() const;
  /// Of the thread that drives the step.
  double wait_seconds() const;
  /// All fields but the padding, which no step changes; see measure_padding.
  StepBytes bytes() const;

 private:
  fsdp::Unit& root_;
  fsdp::RuntimeStats before_;
  std::chrono::steady_clock::time_point start_;
};

/// Bytes of the units' images that hold no parameter: gathers one unit after the other and looks at how much memory
/// it takes. Collective.
Index measure_padding(fsdp::Unit& root, at::ScalarType param_dtype);

/// The same quantities as the plan states them.
StepBytes to_step_bytes(const fsdp::StepForecast& forecast);

}  // namespace ragged::train
