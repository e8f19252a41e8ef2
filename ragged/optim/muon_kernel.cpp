// Compiled with -ffp-contract=off (CMakeLists.txt).
#include "ragged/optim/muon_kernel.h"

#include "ragged/optim/muon_math.h"

namespace ragged::optim {
namespace {

float load(const void* data, bool is_bf16, std::int64_t i) {
  return is_bf16 ? widen(static_cast<const std::uint16_t*>(data)[i]) : static_cast<const float*>(data)[i];
}

void store(const Run& run, std::int64_t i, float value) {
  if (run.is_bf16) {
    static_cast<std::uint16_t*>(run.data)[i] = narrow(value);
  } else {
    static_cast<float*>(run.data)[i] = value;
  }
}

}  // namespace

void muon_pack(const MuonPack& args, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
    const float grad = load(args.grads.data, args.grads.is_bf16, i) * args.grad_scale;
    const float momentum = muon_momentum(load(args.momentum.data, args.momentum.is_bf16, i), grad, args.beta);
    store(args.momentum, i, momentum);
    store(args.out, i, muon_direction(momentum, grad, args.beta, args.nesterov));
  }
}

void muon_apply(const MuonApply& args, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
    const float update = load(args.update.data, args.update.is_bf16, i);
    args.params[i] = muon_param(args.params[i], update, args.decay, args.step_size);
  }
}

}  // namespace ragged::optim
