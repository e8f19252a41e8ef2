#include "ragged/train/step_meter.h"

#include <vector>

#include <c10/core/ScalarType.h>

namespace ragged::train {

StepMeter::StepMeter(fsdp::Unit& root) : root_(root) {
  root_.reset_peaks();
  before_ = root_.stats();
  start_ = std::chrono::steady_clock::now();
}

double StepMeter::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

double StepMeter::wait_seconds() const {
  return root_.stats().wait_seconds - before_.wait_seconds;
}

StepBytes StepMeter::bytes() const {
  const fsdp::RuntimeStats after = root_.stats();
  return {
      .gathered_bytes = after.traffic.gathered_bytes - before_.traffic.gathered_bytes,
      .reduced_bytes = after.traffic.reduced_bytes - before_.traffic.reduced_bytes,
      .cast_bytes = after.bytes.cast_in - before_.bytes.cast_in,
      .gradient_bytes = after.bytes.cast_grad + after.bytes.in_place - before_.bytes.cast_grad - before_.bytes.in_place,
      .copied_bytes = after.bytes.copied - before_.bytes.copied,
      .peak_image_bytes = after.peak_image_bytes,
  };
}

Index measure_padding(fsdp::Unit& root, at::ScalarType param_dtype) {
  const auto units = root.units();
  std::vector<Index> param_bytes(units.size());
  for (const buffer::ShardedTensor& parameter : root.sharded_parameters()) {
    param_bytes[static_cast<std::size_t>(parameter.unit)] +=
        checked_product(parameter.shape) * static_cast<Index>(c10::elementSize(param_dtype));
  }
  Index padding = 0;
  for (std::size_t i = 0; i < units.size(); ++i) {
    const Index before = root.stats().image_bytes_in_use;
    units[i]->unshard();
    padding += root.stats().image_bytes_in_use - before - param_bytes[i];
    units[i]->reshard();
  }
  return padding;
}

StepBytes to_step_bytes(const fsdp::StepForecast& forecast) {
  return {
      .padding_bytes = forecast.padding_bytes,
      .gathered_bytes = forecast.gathered_bytes,
      .reduced_bytes = forecast.reduced_bytes,
      .cast_bytes = forecast.cast_in_bytes,
      .gradient_bytes = forecast.cast_grad_bytes,
      .copied_bytes = forecast.copied_bytes,
      .peak_image_bytes = forecast.peak_image_bytes,
  };
}

}  // namespace ragged::train
