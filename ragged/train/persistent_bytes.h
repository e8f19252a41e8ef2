// What a rank holds from one step to the next: masters, gradients, optimizer states; as the plan says, and as the
// tensors are.
#pragma once

#include <span>

#include "ragged/fsdp/unit.h"
#include "ragged/optim/make_optimizer.h"
#include "ragged/train/metrics.h"

namespace ragged::train {

/// From the units' plans, as `ragged plan` does it but for this rank: padding of shards counts in parameters and
/// gradients. Which format states have is in the rows, how many bytes that makes isn't taken from there; where states
/// lie whole on one rank, `spec` says what decides on which.
PersistentBytes planned_persistent_bytes(
    fsdp::Unit& root, std::span<const optim::OptimizerRow> rows, const optim::OptimizerSpec& spec);

/// Of the tensors. While there are gradients, that is, between backward and zero_grad().
PersistentBytes measured_persistent_bytes(fsdp::Unit& root, const optim::Optimizer& optimizer);

}  // namespace ragged::train
