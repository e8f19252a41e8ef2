// Building a model without memory: parameters that have sizes and a dtype but no bytes until their module is sharded
// and init_parameters() or a checkpoint fills the shards.
#pragma once

#include "ragged/buffer/droppable_storage.h"

namespace ragged::fsdp {

/// For register_parameter() in modules that are to be sharded. Any op on it before that raises.
inline at::Tensor deferred_parameter(
    at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat, c10::Device device = c10::Device(c10::kCPU)) {
  return buffer::tensor_without_bytes(sizes, dtype, device);
}

}  // namespace ragged::fsdp
