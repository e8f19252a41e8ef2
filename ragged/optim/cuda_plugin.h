// What lies between the optimizers and their CUDA kernels, which are a plug-in (libragged_optim_cuda.so): plain data
// and one table of functions, so that the library itself needs no CUDA header and loads no CUDA library. All pointers
// are to device memory.
#pragma once

#include <cstdint>

#include "ragged/optim/tile_codes.h"

namespace ragged::optim {

/// A span of parameters with one set of constants; as AdamWRun of adamw_kernel.h.
struct CudaAdamWRun {
  float* params;
  const void* grads;
  void* exp_avg;
  void* exp_avg_sq;
  std::uint16_t* image;  // or null
  std::int64_t numel;
  AdamWStep step;
  bool grads_are_bf16;
  bool moments_are_bf16;
};

/// One piece of adamw8bit_step.h, its geometry flattened.
struct CudaTilePiece {
  float* params;
  const void* grads;
  std::uint16_t* image;  // or null
  std::uint8_t* first_codes;
  std::uint8_t* second_codes;
  float* first_scales;
  float* second_scales;
  std::int64_t matrix_rows;
  std::int64_t columns;
  std::int64_t first_strip;
  std::int64_t num_strips;
  AdamWStep step;
  bool grads_are_bf16;
};

struct CudaTileArgs {
  const CudaTilePiece* pieces;  // in host memory
  int count;
  float grad_scale;
  TileFormat format;
  bool guards;
  const DynamicTables* tables;  // in device memory; null for the power format
  std::int64_t* not_finite;     // in device memory; added to
};

/// Muon's two passes over a piece (muon_math.h).
struct CudaMuonPack {
  const void* grads;
  void* momentum;
  void* out;  // what travels: bf16 or fp32
  std::int64_t numel;
  float grad_scale;
  float beta;
  bool nesterov;
  bool grads_are_bf16;
  bool momentum_is_bf16;
  bool out_is_bf16;
};
struct CudaMuonApply {
  float* params;
  const void* update;
  std::int64_t numel;
  float decay;
  float step_size;
  bool update_is_bf16;
};

/// Each returns a cudaError_t as a number, 0 for success, and only launches: nothing waits. `stream` is a cudaStream_t
/// of the current device.
struct CudaKernels {
  int (*adamw)(const CudaAdamWRun* runs, int count, float grad_scale, void* stream);
  int (*adamw8bit)(const CudaTileArgs& args, void* stream);
  int (*muon_pack)(const CudaMuonPack& args, void* stream);
  int (*muon_apply)(const CudaMuonApply& args, void* stream);
  const char* (*error_text)(int error);
};
inline constexpr char kCudaKernelsSymbol[] = "ragged_optim_cuda_kernels";

}  // namespace ragged::optim
