// The CUDA kernels of the optimizers, loaded from their plug-in when a CUDA tensor first comes. Where the plug-in
// wasn't built or can't be loaded, callers go through ATen: the same formulas, an operation at a time.
#pragma once

#include <cstdint>
#include <span>

#include "ragged/optim/adamw8bit_step.h"
#include "ragged/optim/adamw_step.h"
#include "ragged/optim/cuda_plugin.h"

namespace ragged::optim {

/// Null where there are none. Looked up once a process; RAGGED_CUDA_KERNELS=0 says there are none.
const CudaKernels* cuda_kernels();

/// Whether the kernel takes this piece: on a CUDA device, fp32 parameters, dtypes as adamw_step.h says.
bool has_cuda_kernel(const AdamWPiece& piece);
bool has_cuda_kernel(const AdamW8bitPiece& piece);

/// Whether the kernels of Muon's passes take tensors like this one: fp32 or bf16 on a CUDA device.
bool has_cuda_muon(const at::Tensor& tensor);
/// As muon_passes.h; `param` fp32.
void muon_pack_by_kernel(
    double momentum_decay, bool nesterov, double grad_scale, const at::Tensor& grad, const at::Tensor& momentum,
    const at::Tensor& out);
void muon_apply_by_kernel(const at::Tensor& param, const at::Tensor& update, double decay, double step_size);

/// Pieces with has_cuda_kernel(), all of one device; on its current stream. Throws Error with CUDA's own words where a
/// launch fails.
void adamw_step_on_cuda(std::span<const AdamWPiece> pieces, const StepScale& scale);
/// `not_finite`: int64 scalar on the device, added to.
void adamw8bit_step_on_cuda(
    std::span<const AdamW8bitPiece> pieces, const StepScale& scale, const TileOptions& options,
    const at::Tensor& not_finite);

}  // namespace ragged::optim
