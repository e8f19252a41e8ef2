// The check of this layer: like RAGGED_CHECK, but what it throws says that a file is missing, damaged or doesn't fit.
#pragma once

#include <string>

#include "ragged/base/error.h"

namespace ragged::checkpoint::detail {

// Cold and out of line, so that a check costs its caller one compare.
[[noreturn]] void throw_checkpoint_error(std::string message);

}  // namespace ragged::checkpoint::detail

/// Throws CheckpointError unless `cond` holds. The message names the file, and the tensor where there is one.
#define RAGGED_CHECKPOINT_CHECK(cond, ...)                                              \
  do {                                                                                  \
    if (!(cond)) [[unlikely]]                                                           \
      ::ragged::checkpoint::detail::throw_checkpoint_error(::fmt::format(__VA_ARGS__)); \
  } while (false)
