// The arithmetic of one AdamW step over a run of elements. Raw pointers only, so it compiles without torch.
#pragma once

#include <cstdint>

namespace ragged::optim {

/// Constants of one step of one parameter (Loshchilov and Hutter, 2019; the order of operations of torch's AdamW).
struct AdamWStep {
  float decay = 1.0F;  // 1 - lr * weight_decay, or 1
  float beta1 = 0.9F;
  float one_minus_beta1 = 0.1F;
  float beta2 = 0.999F;
  float one_minus_beta2 = 0.001F;
  float step_size = 0.0F;         // lr / (1 - beta1^t)
  float root_correction2 = 1.0F;  // sqrt(1 - beta2^t)
  float eps = 1e-8F;
};

/// params, grads and moments: `numel` floats each. Compiled without contraction: the bits of an element depend on its
/// own inputs alone, not on where a run starts or ends.
void adamw_step(
    const AdamWStep& step, std::int64_t numel, float* params, const float* grads, float* exp_avg, float* exp_avg_sq);
/// The same with moments stored as bfloat16 (given as their 16 bits, rounded to nearest even).
void adamw_step(
    const AdamWStep& step, std::int64_t numel, float* params, const float* grads, std::uint16_t* exp_avg,
    std::uint16_t* exp_avg_sq);

}  // namespace ragged::optim
