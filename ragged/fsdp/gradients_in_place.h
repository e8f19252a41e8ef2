// Linear layers and embeddings whose weights' gradients are computed where they are reduced: the product of backward
// writes into the weight's slot of its unit's reduce buffer, and no gradient tensor is made, filled and copied.
//
// [Note: gradients in place]
// Each function is one autograd node. Where its weight is a parameter of a unit that asks for it
// (FullyShardOptions::gradients_in_place) the node's backward writes the slot and returns nothing for the weight; the
// weight's accumulator runs all the same, with nothing to accumulate, so the unit's hooks and used-flags work as ever.
// Results of forward, and gradients of everything but the weight, have the bits of at::linear and at::embedding.
// The weight's gradient goes autograd's way instead wherever somebody wants to have it: under create_graph, and in
// autograd::grad. Where a weight isn't such a parameter, is frozen, or nothing is recorded, where autocast is on or an
// argument is a tensor of another kind (wrapped for a transform, a subclass), at::linear and at::embedding are called.
#pragma once

#include <optional>
#include <span>

#include <ATen/core/Tensor.h>

#include "ragged/base/math.h"

namespace ragged::fsdp {

/// x W^T + b. x: [.., in], weight: [out, in], bias: [out], none or undefined -> [.., out]. In place for contiguous x.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias = {});

/// The rows of x in runs, counts[e] of them for the e-th matrix of a stack, by which they are multiplied.
/// x: [sum of counts, in], weight: [groups, out, in], bias: [groups, out] -> [sum of counts, out]. A matrix without
/// rows gets a gradient of zeros. Throws InvalidArgument where the counts don't fit.
at::Tensor grouped_linear(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    std::span<const Index> counts);

/// weight: [count, dim], indices: int32 or int64 of any shape -> that shape plus [dim]. Row `padding_index` gets no
/// gradient (-1: none is). In place on the CPU alone, where rows are added up in the order of the indices.
at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices, Index padding_index = -1);

/// For a node whose backward calls autograd::grad for parameters of units and hands the result to its own graph
/// (activation_checkpoint.h): while it lives, gradients are computed in place on this thread if they would be here.
class GradsArePassedOn {
 public:
  GradsArePassedOn();
  ~GradsArePassedOn();
  GradsArePassedOn(const GradsArePassedOn&) = delete;
  GradsArePassedOn& operator=(const GradsArePassedOn&) = delete;

 private:
  bool before_;
};

}  // namespace ragged::fsdp
