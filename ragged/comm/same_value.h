// Whether all ranks hold the same: a plan, a text, whatever has a 64-bit hash.
#pragma once

#include <cstdint>
#include <string_view>

#include "ragged/comm/communicator.h"

namespace ragged::comm {

/// The answer is the same on all ranks. Collective: one small all-reduce; `name` appears in its errors. The lowest two
/// bits don't count.
bool is_same_on_all(const Communicator& group, std::uint64_t hash, std::string_view name);

}  // namespace ragged::comm
