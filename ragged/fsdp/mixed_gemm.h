// A matrix product that is wider than its factors: bf16 times bf16 in fp32. ATen has it on CUDA alone.
#pragma once

#include <ATen/core/Tensor.h>

namespace ragged::fsdp {

/// out = a b, or out += a b. a: [m, k] and b: [k, n] of one dtype with a unit stride somewhere, out: [m, n] contiguous
/// fp32. False, and nothing is written, where these dtypes, strides or this machine's libraries don't allow it.
bool mixed_gemm(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out, bool accumulate);

}  // namespace ragged::fsdp
