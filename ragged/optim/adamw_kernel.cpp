// Compiled with -ffp-contract=off (CMakeLists.txt).
#include "ragged/optim/adamw_kernel.h"

#include <cmath>
#include <cstring>

namespace ragged::optim {
namespace {

float load(float value) {
  return value;
}
float load(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value = 0.0F;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

void store(float value, float& out) {
  out = value;
}
void store(float value, std::uint16_t& out) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  const std::uint32_t nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  out = static_cast<std::uint16_t>(nan ? 0x7FC0U : rounded);
}

template <class Moment>
void run(
    const AdamWStep& s, std::int64_t numel, float* params, const float* grads, Moment* exp_avg, Moment* exp_avg_sq) {
  for (std::int64_t i = 0; i < numel; ++i) {
    const float g = grads[i];
    const float m = s.beta1 * load(exp_avg[i]) + s.one_minus_beta1 * g;
    const float v = s.beta2 * load(exp_avg_sq[i]) + s.one_minus_beta2 * (g * g);
    store(m, exp_avg[i]);
    store(v, exp_avg_sq[i]);
    const float denominator = std::sqrt(v) / s.root_correction2 + s.eps;
    params[i] = params[i] * s.decay - s.step_size * (m / denominator);
  }
}

}  // namespace

void adamw_step(
    const AdamWStep& step, std::int64_t numel, float* params, const float* grads, float* exp_avg, float* exp_avg_sq) {
  run(step, numel, params, grads, exp_avg, exp_avg_sq);
}

void adamw_step(
    const AdamWStep& step, std::int64_t numel, float* params, const float* grads, std::uint16_t* exp_avg,
    std::uint16_t* exp_avg_sq) {
  run(step, numel, params, grads, exp_avg, exp_avg_sq);
}

}  // namespace ragged::optim
