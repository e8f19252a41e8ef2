// Muon's element-wise passes on CUDA: momentum and packing before the exchange, decay and update after it.
// Newton-Schulz between them is matrix products, which ATen does. The arithmetic is the CPU's (muon_math.h). Also the
// plug-in's table of entries.
#include <cuda_runtime.h>

#include "ragged/optim/cuda_entries.h"
#include "ragged/optim/elements.h"
#include "ragged/optim/muon_math.h"

namespace ragged::optim {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kPerBlock = 4096;

__device__ std::int64_t block_end(std::int64_t numel) {
  const std::int64_t end = (blockIdx.x + std::int64_t{1}) * kPerBlock;
  return end < numel ? end : numel;
}

__global__ void __launch_bounds__(kThreads) pack_kernel(const CudaMuonPack args) {
  const std::int64_t end = block_end(args.numel);
  for (std::int64_t i = blockIdx.x * kPerBlock + threadIdx.x; i < end; i += kThreads) {
    const float grad = load_element(args.grads, i, args.grads_are_bf16) * args.grad_scale;
    const float momentum = muon_momentum(load_element(args.momentum, i, args.momentum_is_bf16), grad, args.beta);
    store_element(args.momentum, i, args.momentum_is_bf16, momentum);
    store_element(args.out, i, args.out_is_bf16, muon_direction(momentum, grad, args.beta, args.nesterov));
  }
}

__global__ void __launch_bounds__(kThreads) apply_kernel(const CudaMuonApply args) {
  const std::int64_t end = block_end(args.numel);
  for (std::int64_t i = blockIdx.x * kPerBlock + threadIdx.x; i < end; i += kThreads) {
    args.params[i] =
        muon_param(args.params[i], load_element(args.update, i, args.update_is_bf16), args.decay, args.step_size);
  }
}

unsigned blocks(std::int64_t numel) {
  return static_cast<unsigned>((numel + kPerBlock - 1) / kPerBlock);
}

const char* error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // namespace

int muon_pack_on_cuda(const CudaMuonPack& args, void* stream) {
  if (args.numel == 0) return cudaSuccess;
  pack_kernel<<<blocks(args.numel), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

int muon_apply_on_cuda(const CudaMuonApply& args, void* stream) {
  if (args.numel == 0) return cudaSuccess;
  apply_kernel<<<blocks(args.numel), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

}  // namespace ragged::optim

extern "C" __attribute__((visibility("default"))) const ragged::optim::CudaKernels ragged_optim_cuda_kernels{
    ragged::optim::adamw_on_cuda, ragged::optim::adamw8bit_on_cuda, ragged::optim::muon_pack_on_cuda,
    ragged::optim::muon_apply_on_cuda, ragged::optim::error_text};
