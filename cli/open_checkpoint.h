// What commands mean by the path of a checkpoint.
#pragma once

#include <string>

#include "ragged/checkpoint/read.h"

namespace ragged::cli {

/// The checkpoint in `folder`, or the newest complete one of a folder of steps. Throws CheckpointError where there is
/// none.
checkpoint::Checkpoint open_checkpoint(const std::string& folder);

}  // namespace ragged::cli
