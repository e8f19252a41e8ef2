// The one symbol between the library and its NCCL plug-in.
#pragma once

#include <chrono>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ragged::comm {

using MakeNcclBackend = c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>&, int, int, c10::Device, std::chrono::milliseconds);
inline constexpr char kMakeNcclBackendSymbol[] = "ragged_make_nccl_backend";

}  // namespace ragged::comm
