// Ranks that fail together: what goes wrong on one is the same error on all, so that nobody waits for a rank that has
// given up.
#pragma once

#include <functional>
#include <string>

#include "ragged/comm/communicator.h"

namespace ragged::checkpoint {

/// Runs `body`, which issues no collective, and returns when all ranks have. Where it threw on some, all throw what the
/// highest of them did: InvalidArgument as such, anything else as CheckpointError; with that rank's number unless all
/// failed. Collective.
void agree(const comm::Communicator& all, const std::function<void()>& body);

/// The text that `root` has, on every rank. Collective.
std::string broadcast_text(const comm::Communicator& all, const std::string& text, int root);

}  // namespace ragged::checkpoint
