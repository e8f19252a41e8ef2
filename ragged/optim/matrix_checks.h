// What ranks compare before they trust that they work on the same matrices: plans, once, and which gradients are
// missing, where RAGGED_CHECK=1 asks for it. Collective.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "ragged/comm/communicator.h"
#include "ragged/optim/matrix_layout.h"

namespace ragged::optim {

/// Throws InvalidArgument on all ranks of the `whose` ("shard", "replicate") group unless they have one hash;
/// `optimizer` in its text. A group of one compares nothing.
void check_same_plan(
    const comm::Communicator& group, std::uint64_t hash, std::string_view optimizer, std::string_view whose);

/// Throws InvalidArgument on all ranks of both groups where some have a gradient of a parameter that others lack.
/// `has_grad` by parameter, 0 or 1. Compares nothing in groups that don't check their order: it is a collective more.
void check_same_gradients(
    std::span<const MatrixParam> params, std::span<const std::uint8_t> has_grad, const comm::Communicator& shard,
    const comm::Communicator& replicate, std::string_view optimizer);

}  // namespace ragged::optim
