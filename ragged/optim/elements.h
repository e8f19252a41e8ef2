// One element of an array that is fp32 or bfloat16, which is known only at run time; for CPU and CUDA kernels alike.
#pragma once

#include "ragged/optim/adamw_math.h"

namespace ragged::optim {

RAGGED_DEVICE float load_element(const void* data, std::int64_t i, bool is_bf16) {
  return is_bf16 ? widen(static_cast<const std::uint16_t*>(data)[i]) : static_cast<const float*>(data)[i];
}

RAGGED_DEVICE void store_element(void* data, std::int64_t i, bool is_bf16, float value) {
  if (is_bf16) {
    static_cast<std::uint16_t*>(data)[i] = narrow(value);
  } else {
    static_cast<float*>(data)[i] = value;
  }
}

}  // namespace ragged::optim
