// How a unit learns where backward is: an identity on its inputs, and hooks on the graph between inputs and outputs.
//
// [Note: escaped tensors]
// A hook on a unit's returned tensors isn't enough to gather its parameters in time: the loss may be built on a
// tensor that a module kept in an attribute, and autograd drops a tensor's hooks when a view of it is rewritten in
// place. So the hook sits on every node of the graph that the unit's forward made, as far as it is reachable from
// what the unit returned; whichever runs first gathers. A branch that leads to the loss and to no returned tensor
// stays out of reach; ops on a freed parameter name it there (see [Note: droppable storage]).
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ragged/comm/compat.h"
#include "ragged/fsdp/tensor_refs.h"

namespace ragged::fsdp {

/// Replaces those tensors that require grad by an identity on them; `left` runs in backward once all their gradients
/// are there. Returns the node, null where none requires grad.
comm::compat::NodePtr mark_inputs(const TensorRefs& tensors, std::function<void()> left);

/// Calls `reached` before any node runs that lies between `outputs` and `inputs` (the node of mark_inputs). Nodes of
/// parameters and nodes beyond the marked inputs are left alone, and so are those that hold a hook of another
/// `owner`'s forward.
void hook_graph(
    const TensorRefs& outputs, const comm::compat::NodePtr& inputs, const void* owner, std::function<void()> reached);

}  // namespace ragged::fsdp
