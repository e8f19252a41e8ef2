// AdamW over a list of pieces: one fused pass over all of them together. What the C++ class and the Python front share;
// knows neither units nor communication.
#pragma once

#include <cstdint>
#include <span>

#include <ATen/core/Tensor.h>

#include "ragged/optim/adamw_math.h"
#include "ragged/optim/optimizer.h"

namespace ragged::optim {

/// Settings of a step, before they become its constants.
struct AdamWRates {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;  // 0: none
};
/// Constants of a parameter's `step`-th step, the first being 1. In double, then rounded once: alike on every rank.
AdamWStep adamw_constants(const AdamWRates& rates, std::int64_t step);
/// Throws InvalidArgument, with `optimizer` in its text, unless lr, eps and decay are >= 0 and the betas in [0, 1).
void check_rates(const AdamWRates& rates, const char* optimizer);

/// What one rank holds of one parameter. All tensors of one device and length, contiguous, 1-D or not; they may be
/// empty.
struct AdamWPiece {
  at::Tensor param;       // master, fp32; another floating dtype takes the slow way
  at::Tensor grad;        // fp32 or bf16
  at::Tensor exp_avg;     // fp32 or bf16, both alike
  at::Tensor exp_avg_sq;  // as exp_avg
  at::Tensor image = {};  // optional, bf16: receives the new parameter, rounded, in the same pass
  AdamWStep step{};
};

/// Steps all pieces with gradients times scale.grad; with scale.skip it does nothing. Neighbours in memory whose
/// constants agree become one span, and threads share all spans together. On the CPU, with the dtypes above, an
/// element's bits depend on its own inputs alone; other devices and dtypes go through ATen, an operation at a time
/// (adamw_aten.h). Gradients are left as they are. Throws InvalidArgument on tensors that don't fit.
void adamw_step(std::span<const AdamWPiece> pieces, const StepScale& scale = {});

}  // namespace ragged::optim
