#include "ragged/optim/muon_passes.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "ragged/optim/cuda_kernels.h"
#include "ragged/optim/kernel_dtypes.h"
#include "ragged/optim/muon_kernel.h"

namespace ragged::optim {
namespace {

constexpr Index kGrain = 1 << 15;  // elements a thread at least

Run run_at(const at::Tensor& tensor, Index offset) {
  return {
      .data = static_cast<char*>(tensor.mutable_data_ptr()) + offset * tensor.element_size(),
      .is_bf16 = tensor.scalar_type() == at::kBFloat16};
}

ConstRun const_run_at(const at::Tensor& tensor, Index offset) {
  return {
      .data = static_cast<const char*>(tensor.const_data_ptr()) + offset * tensor.element_size(),
      .is_bf16 = tensor.scalar_type() == at::kBFloat16};
}

// x + factor * (y - x), multiplied and added apart, as the kernels do.
at::Tensor moved(const at::Tensor& x, const at::Tensor& y, float factor) {
  return x + (y - x) * factor;
}

}  // namespace

void muon_pack_pass(
    const MuonRates& rates, double grad_scale, const at::Tensor& grad, const at::Tensor& momentum,
    const at::Tensor& out) {
  if (has_cuda_muon(grad)) return muon_pack_by_kernel(rates.momentum, rates.nesterov, grad_scale, grad, momentum, out);
  const auto beta = static_cast<float>(rates.momentum);
  if (!grad.is_cpu() || !is_float_or_bf16(grad)) {
    const at::Tensor g = grad.to(at::kFloat) * static_cast<float>(grad_scale);
    const at::Tensor next = moved(momentum.to(at::kFloat), g, 1.0F - beta);
    momentum.copy_(next);
    out.copy_(rates.nesterov ? moved(g, next, beta) : next);
    return;
  }
  at::parallel_for(0, grad.numel(), kGrain, [&](Index begin, Index end) {
    muon_pack(
        {.grads = const_run_at(grad, begin),
         .momentum = run_at(momentum, begin),
         .out = run_at(out, begin),
         .grad_scale = static_cast<float>(grad_scale),
         .beta = beta,
         .nesterov = rates.nesterov},
        end - begin);
  });
}

void muon_apply_pass(const at::Tensor& param, const at::Tensor& update, double decay, double step_size) {
  if (has_cuda_muon(param) && param.scalar_type() == at::kFloat)
    return muon_apply_by_kernel(param, update, decay, step_size);
  const auto decay32 = static_cast<float>(decay);
  const auto step32 = static_cast<float>(step_size);
  if (!param.is_cpu() || param.scalar_type() != at::kFloat) {
    param.copy_(param.to(at::kFloat) * decay32 - update.to(at::kFloat) * step32);
    return;
  }
  at::parallel_for(0, param.numel(), kGrain, [&](Index begin, Index end) {
    muon_apply(
        {.params = param.mutable_data_ptr<float>() + begin,
         .update = const_run_at(update, begin),
         .decay = decay32,
         .step_size = step32},
        end - begin);
  });
}

}  // namespace ragged::optim
