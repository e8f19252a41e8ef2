// Where a rank computes, and how much memory it has needed there.
#pragma once

#include <string_view>

#include <c10/core/Device.h>

#include "ragged/base/math.h"
#include "ragged/comm/rank_env.h"

namespace ragged::train {

/// `setting`: "auto", "cpu" or "cuda". CUDA devices go to ranks by their local rank; auto takes them when there is
/// one for every rank of this machine, else the CPU. Throws InvalidArgument when "cuda" has too few.
c10::Device choose_device(std::string_view setting, const comm::RankEnv& env);

/// Most bytes in use so far: of the CUDA device's tensors, or the resident memory of this process (0 where /proc
/// doesn't say).
Index peak_memory_bytes(c10::Device device);

}  // namespace ragged::train
