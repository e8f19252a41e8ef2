// Global gradient norm over all shards, and clipping by it.
#pragma once

#include "ragged/fsdp/unit.h"

namespace ragged::optim {

/// Euclidean norm over all gradients of the tree, accumulated in fp64; the same number on all ranks. Collective:
/// a rank with nothing to add takes part. Parameters without gradient count as zero.
double grad_norm(fsdp::Unit& root);

struct GradClip {
  double norm = 0.0;    // before clipping
  double factor = 1.0;  // max_norm / norm where norm > max_norm, else 1; 1 too where the norm isn't finite
};

/// What clipping would do, for StepScale::grad: the gradients stay as they are, and the step needs no pass more.
/// Collective, and throws, like clip_grad_norm.
GradClip grad_clip(fsdp::Unit& root, double max_norm);

/// Scales the gradients in place by max_norm / norm where norm > max_norm. Returns the norm before clipping.
/// Throws InvalidArgument unless max_norm > 0. A norm that isn't finite is returned and nothing is scaled.
double clip_grad_norm(fsdp::Unit& root, double max_norm);

}  // namespace ragged::optim
