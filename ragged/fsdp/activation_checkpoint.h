// Activation checkpointing for C++ blocks: keeps a block's inputs only and runs its forward again in backward.
//
// [Note: checkpoint as one node]
// The whole block is one autograd node whose inputs are the tensors *and the parameters*. Its backward runs forward
// again under grad and asks autograd::grad for the gradients of both, so parameter gradients travel through the
// outer graph like any others: they are accumulated once, the unit's hooks fire once, and it works when no input
// needs a gradient. The unit's events stay outside of it: the recompute neither gathers, reshards nor queues the
// final callback.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ragged/fsdp/tensor_refs.h"

namespace ragged::fsdp {

using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Runs `function` on `inputs` without recording, as one node over inputs and params. `function` is called again in
/// backward, on the same thread, with the default generators of the inputs' device as they were now. It must be pure
/// but for random numbers.
std::vector<at::Tensor> checkpoint(
    TensorFunction function, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& params);

/// The same for a callable over any values that hold tensors (see collect_tensors).
template <class Run, class Inputs>
auto checkpointed(Run run, const Inputs& inputs, const std::vector<at::Tensor>& params) {
  using Outputs = decltype(run(std::declval<Inputs&>()));
  auto first = std::make_shared<std::optional<Outputs>>();
  auto is_first = std::make_shared<bool>(true);
  TensorFunction function = [run, inputs, first, is_first](const std::vector<at::Tensor>& tensors) {
    Inputs copy = inputs;
    TensorRefs refs;
    collect_tensors(copy, refs);
    for (std::size_t i = 0; i < refs.size(); ++i) *refs[i] = tensors[i];
    Outputs outputs = run(copy);
    TensorRefs output_refs;
    collect_tensors(outputs, output_refs);
    std::vector<at::Tensor> values;
    for (const at::Tensor* value : output_refs) values.push_back(*value);
    if (*is_first) first->emplace(std::move(outputs));  // its structure; the tensors are replaced below
    *is_first = false;
    return values;
  };
  std::vector<at::Tensor> tensors;
  Inputs copy = inputs;
  TensorRefs refs;
  collect_tensors(copy, refs);
  for (const at::Tensor* value : refs) tensors.push_back(*value);
  const std::vector<at::Tensor> values = checkpoint(std::move(function), tensors, params);
  Outputs outputs = std::move(**first);
  first->reset();
  TensorRefs output_refs;
  collect_tensors(outputs, output_refs);
  for (std::size_t i = 0; i < output_refs.size(); ++i) *output_refs[i] = values[i];
  return outputs;
}

}  // namespace ragged::fsdp
