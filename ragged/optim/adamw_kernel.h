// One AdamW step over a run of elements on the CPU. Raw pointers only: no torch, no threads.
#pragma once

#include <cstdint>

#include "ragged/optim/adamw_math.h"
#include "ragged/optim/isa.h"

namespace ragged::optim {

/// Arrays of equal length. Grads and moments are fp32, or bfloat16 where the flag says so (moments rounded to nearest
/// even when stored).
struct AdamWRun {
  float* params = nullptr;
  const void* grads = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  std::uint16_t* image = nullptr;  // bfloat16, or null: receives the new parameters, rounded to nearest even
  bool grads_are_bf16 = false;
  bool moments_are_bf16 = false;
};

/// Steps elements [begin, end) of the run with gradients times `grad_scale`. The bits of an element depend on its own
/// inputs alone: not on begin and end, not on the instruction set.
void adamw_step(
    const AdamWStep& step, float grad_scale, const AdamWRun& run, std::int64_t begin, std::int64_t end,
    Isa isa = best_isa());

}  // namespace ragged::optim
