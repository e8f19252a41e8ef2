// The arithmetic of AdamW for one element, shared by every kernel: CPU in vectors, CUDA, and the tests' scalar loops.
// No torch, no loops, no memory layout. Whoever includes it compiles without contraction (-ffp-contract=off; nvcc
// --fmad=false) and without fast-math, so that an element's bits depend on its own inputs alone.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef __CUDA_ARCH__
#include <cmath>
#endif

#ifdef __CUDACC__
#define RAGGED_DEVICE __host__ __device__ __forceinline__
#else
#define RAGGED_DEVICE inline __attribute__((always_inline))
#endif

namespace ragged::optim {

/// Constants of one step of one parameter (Loshchilov and Hutter, 2019; the order of operations of torch's AdamW).
struct AdamWStep {
  float decay = 1.0F;  // 1 - lr * weight_decay, or 1
  float beta1 = 0.9F;
  float one_minus_beta1 = 0.1F;
  float beta2 = 0.999F;
  float one_minus_beta2 = 0.001F;
  float step_size = 0.0F;         // lr / (1 - beta1^t)
  float root_correction2 = 1.0F;  // sqrt(1 - beta2^t)
  float eps = 1e-8F;

  friend bool operator==(const AdamWStep&, const AdamWStep&) = default;
};

/// Finite gradients beyond this count as this: their square must stay finite, or the second moment would be infinite
/// for ever and the parameter dead.
inline constexpr float kLargestGradient = 1e19F;

RAGGED_DEVICE std::uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

RAGGED_DEVICE float float_of(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value = 0.0F;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

/// Correctly rounded, as IEEE 754 has it.
RAGGED_DEVICE float square_root(float value) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(value);
#else
  return std::sqrt(value);
#endif
}

/// bfloat16 given as its 16 bits.
RAGGED_DEVICE float widen(std::uint16_t bits) {
  return float_of(static_cast<std::uint32_t>(bits) << 16);
}

/// To bfloat16, to nearest even; a NaN stays one.
RAGGED_DEVICE std::uint16_t narrow(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  return static_cast<std::uint16_t>((bits & 0x7FFFFFFFU) > 0x7F800000U ? 0x7FC0U : rounded);
}

RAGGED_DEVICE bool is_finite(float value) {
  return (bits_of(value) & 0x7FFFFFFFU) < 0x7F800000U;
}

/// The gradient as the moments take it: as it is unless it is finite and beyond kLargestGradient.
RAGGED_DEVICE float bounded(float grad) {
  const float magnitude = float_of(bits_of(grad) & 0x7FFFFFFFU);
  const float edge = float_of((bits_of(grad) & 0x80000000U) | bits_of(kLargestGradient));
  return (magnitude > kLargestGradient && is_finite(grad)) ? edge : grad;
}

struct AdamWMoments {
  float first;
  float second;
};

/// The moments after this gradient, which already has the step's scale in it. Not finite if it isn't.
RAGGED_DEVICE AdamWMoments adamw_moments(const AdamWStep& s, float grad, float exp_avg, float exp_avg_sq) {
  const float g = bounded(grad);
  return {s.beta1 * exp_avg + s.one_minus_beta1 * g, s.beta2 * exp_avg_sq + s.one_minus_beta2 * (g * g)};
}

/// The parameter after these moments; `root` is the square root of the second. Decay comes before the update. The
/// moments are those before they are stored in fewer bits.
RAGGED_DEVICE float adamw_param(const AdamWStep& s, float param, float exp_avg, float root) {
  return param * s.decay - s.step_size * (exp_avg / (root / s.root_correction2 + s.eps));
}

}  // namespace ragged::optim
