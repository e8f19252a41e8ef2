// A matrix product that is wider than its factors: bf16 times bf16 in fp32, as weight gradients want it. ATen has it on
// CUDA alone; on the CPU it is put together from oneDNN's block product, which torch exports (ATen/native/CPUBlas.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace ragged::fsdp {

/// out = a b, or out += a b. a: [m, k] and b: [k, n] of one dtype, out: [m, n] fp32. Sums are in fp32 and nothing is
/// rounded in between. Takes scratch of the factors' size. False, and nothing is written, where there is no such
/// product: on a CPU for anything but bf16, a transposed, b and out contiguous, AVX-512.
bool mixed_gemm(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out, bool accumulate);

}  // namespace ragged::fsdp
