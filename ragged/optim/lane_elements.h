// Elements of arrays whose dtype a kernel was compiled for, fp32 or the bits of bfloat16, as lanes take them;
// elements.h is for arrays whose dtype is known only at run time.
#pragma once

#include <cstdint>

#include "ragged/optim/adamw_math.h"
#include "ragged/optim/isa_targets.h"

namespace ragged::optim {

RAGGED_INLINE_KERNEL float load(float value) {
  return value;
}
RAGGED_INLINE_KERNEL float load(std::uint16_t bits) {
  return widen(bits);
}
RAGGED_INLINE_KERNEL void store(float value, float& out) {
  out = value;
}
RAGGED_INLINE_KERNEL void store(float value, std::uint16_t& out) {
  out = narrow(value);
}

}  // namespace ragged::optim
