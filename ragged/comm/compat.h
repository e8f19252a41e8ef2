// Every c10d and autograd-internal name that moved between torch 2.11 and 2.15 stands here and nowhere else.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/version.h>

// The header's own feature macro; it came with the new collective names (2.15 has both).
#ifdef C10D_BACKEND_HAS_WINDOW
#define RAGGED_C10D_SINGLE_NAMES 1
#else
#define RAGGED_C10D_SINGLE_NAMES 0
#endif
// The same release lets an armed storage error be disarmed again.
#define RAGGED_STORAGE_ERROR_TEXT RAGGED_C10D_SINGLE_NAMES

namespace ragged::comm::compat {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
/// shared_ptr up to 2.14, intrusive_ptr from 2.15.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// A group written in Python (the threaded groups of torch's tests) has no Backend, and before the new names came C++
/// reached only the coalesced forms of its operations.
enum class Implementation { kBackend, kPython };

inline WorkPtr all_gather(
    c10d::ProcessGroup& group, at::Tensor output, at::Tensor input, const c10d::AllgatherOptions& options = {},
    [[maybe_unused]] Implementation implementation = Implementation::kBackend) {
#if RAGGED_C10D_SINGLE_NAMES
  return group.all_gather_single(output, input, options);
#else
  if (implementation == Implementation::kPython) {
    std::vector<at::Tensor> outputs{output};
    std::vector<at::Tensor> inputs{input};
    return group.allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  return group._allgather_base(output, input, options);
#endif
}

inline WorkPtr reduce_scatter(
    c10d::ProcessGroup& group, at::Tensor output, at::Tensor input, const c10d::ReduceScatterOptions& options,
    [[maybe_unused]] Implementation implementation = Implementation::kBackend) {
#if RAGGED_C10D_SINGLE_NAMES
  return group.reduce_scatter_single(output, input, options);
#else
  if (implementation == Implementation::kPython) {
    std::vector<at::Tensor> outputs{output};
    std::vector<at::Tensor> inputs{input};
    return group.reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  return group._reduce_scatter_base(output, input, options);
#endif
}

inline WorkPtr all_to_all(
    c10d::ProcessGroup& group, at::Tensor output, at::Tensor input, std::vector<int64_t> output_sizes,
    std::vector<int64_t> input_sizes, const c10d::AllToAllOptions& options = {}) {
#if RAGGED_C10D_SINGLE_NAMES
  return group.all_to_all_single(output, input, output_sizes, input_sizes, options);
#else
  return group.alltoall_base(output, input, output_sizes, input_sizes, options);
#endif
}

}  // namespace ragged::comm::compat
