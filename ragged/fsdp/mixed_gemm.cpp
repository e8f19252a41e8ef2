#include "ragged/fsdp/mixed_gemm.h"

#include <ATen/ATen.h>

namespace ragged::fsdp {

bool mixed_gemm(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out, bool accumulate) {
  if (!out.is_cuda() || out.scalar_type() != at::kFloat || !at::isReducedFloatingType(a.scalar_type())) {
    return false;
  }
  at::Tensor target = out;
  if (accumulate) {
    at::addmm_out(target, target, a, b, at::kFloat);
  } else {
    at::mm_out(target, a, b, at::kFloat);
  }
  return true;
}

}  // namespace ragged::fsdp
