// Muon's two element-wise passes over a run of elements on the CPU. Raw pointers only, so it compiles without torch.
#pragma once

#include <cstdint>

namespace ragged::optim {

/// fp32, or bfloat16 as its 16 bits.
struct ConstRun {
  const void* data = nullptr;
  bool is_bf16 = false;
};
struct Run {
  void* data = nullptr;
  bool is_bf16 = false;
};

struct MuonPack {
  ConstRun grads;
  Run momentum;
  Run out;  // what is orthogonalised
  float grad_scale = 1.0F;
  float beta = 0.95F;
  bool nesterov = true;
};
/// Elements [0, numel) of the runs; an element's bits depend on its own inputs alone.
void muon_pack(const MuonPack& args, std::int64_t numel);

struct MuonApply {
  float* params = nullptr;
  ConstRun update;
  float decay = 1.0F;
  float step_size = 0.0F;
};
void muon_apply(const MuonApply& args, std::int64_t numel);

}  // namespace ragged::optim
