// The dtypes that kernels of gradients and moments take; other tensors go through ATen.
#pragma once

#include <ATen/core/Tensor.h>

namespace ragged::optim {

inline bool is_float_or_bf16(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16;
}

}  // namespace ragged::optim
