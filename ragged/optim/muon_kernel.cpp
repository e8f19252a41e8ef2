// Compiled with -ffp-contract=off (CMakeLists.txt).
#include "ragged/optim/muon_kernel.h"

#include "ragged/optim/elements.h"
#include "ragged/optim/muon_math.h"

namespace ragged::optim {
void muon_pack(const MuonPack& args, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
    const float grad = load_element(args.grads.data, i, args.grads.is_bf16) * args.grad_scale;
    const float momentum = muon_momentum(load_element(args.momentum.data, i, args.momentum.is_bf16), grad, args.beta);
    store_element(args.momentum.data, i, args.momentum.is_bf16, momentum);
    store_element(args.out.data, i, args.out.is_bf16, muon_direction(momentum, grad, args.beta, args.nesterov));
  }
}

void muon_apply(const MuonApply& args, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
    const float update = load_element(args.update.data, i, args.update.is_bf16);
    args.params[i] = muon_param(args.params[i], update, args.decay, args.step_size);
  }
}

}  // namespace ragged::optim
