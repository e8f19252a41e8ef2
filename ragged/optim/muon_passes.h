// Muon's element-wise passes over tensors, on whatever device and dtype they are: our kernels where there are any.
#pragma once

#include <ATen/core/Tensor.h>

#include "ragged/optim/optimizer.h"

namespace ragged::optim {

struct MuonRates {
  double momentum = 0.95;
  bool nesterov = true;
};

/// Moves `momentum` by the gradient times `grad_scale` and writes what is to be orthogonalised to `out`. 1-D,
/// contiguous, of one length.
void muon_pack_pass(
    const MuonRates& rates, double grad_scale, const at::Tensor& grad, const at::Tensor& momentum,
    const at::Tensor& out);
/// param <- param * decay - step_size * update, in fp32.
void muon_apply_pass(const at::Tensor& param, const at::Tensor& update, double decay, double step_size);

}  // namespace ragged::optim
