// Muon's arithmetic for one element: momentum before the exchange, decay and update after it. Shared by CPU and CUDA
// kernels; compiled without contraction, like adamw_math.h.
#pragma once

#include "ragged/optim/adamw_math.h"

namespace ragged::optim {

/// The moving average M + (1 - beta) (G - M); torch.optim.Muon's convention.
RAGGED_DEVICE float muon_momentum(float momentum, float grad, float beta) {
  return momentum + (1.0F - beta) * (grad - momentum);
}

/// What is orthogonalised: with Nesterov the gradient moved towards the new momentum, else the momentum.
RAGGED_DEVICE float muon_direction(float momentum, float grad, float beta, bool nesterov) {
  return nesterov ? grad + beta * (momentum - grad) : momentum;
}

/// `decay` is 1 - lr * weight_decay, `step_size` lr times the scale of the matrix.
RAGGED_DEVICE float muon_param(float param, float update, float decay, float step_size) {
  return param * decay - step_size * update;
}

}  // namespace ragged::optim
