// The plug-in: the one file that sees CUDA and NCCL. Built where their headers are found, into a module of its own.
#include "ragged/comm/nccl_plugin.h"

#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

extern "C" c10::intrusive_ptr<c10d::Backend> ragged_make_nccl_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::Device device,
    std::chrono::milliseconds timeout) {
  const c10::cuda::CUDAGuard guard(device);
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  options->is_high_priority_stream = true;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
}
