// Makes an NCCL backend from the plug-in ragged_nccl, which is loaded when a CUDA device is first asked for: the
// library and its programs link no CUDA library and start three times lighter on machines without a GPU.
#pragma once

#include <chrono>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ragged::comm {

/// Collective over the `size` ranks that share `store`. Throws CommError where the plug-in wasn't built or can't be
/// loaded, and says which.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::Device device,
    std::chrono::milliseconds timeout);

}  // namespace ragged::comm
