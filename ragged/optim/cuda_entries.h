// The entry points of the plug-in's kernels, between its own files; see cuda_plugin.h for what they take.
#pragma once

#include "ragged/optim/cuda_plugin.h"

namespace ragged::optim {

int adamw_on_cuda(const CudaAdamWRun* runs, int count, float grad_scale, void* stream);
int adamw8bit_on_cuda(const CudaTileArgs& args, void* stream);
int muon_pack_on_cuda(const CudaMuonPack& args, void* stream);
int muon_apply_on_cuda(const CudaMuonApply& args, void* stream);

}  // namespace ragged::optim
