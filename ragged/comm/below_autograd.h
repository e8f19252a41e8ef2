// A guard for code that moves bytes of images and shards: neither autograd's recording nor version counters see it,
// so the saved weights of a live graph stay valid. (Gloo's all-gather would bump the output's counter, and NoGradGuard
// alone doesn't prevent that.)
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

namespace ragged::comm {

struct BelowAutograd {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
};

}  // namespace ragged::comm
