// `ragged inspect`: what is in a checkpoint, and whether all of it is as it was written.
#pragma once

#include <string>

namespace ragged::cli {

struct InspectArguments {
  std::string folder;  // of a step, or of steps
  bool verify = false;
  bool facts = false;  // print the run's config and other texts in full
};

/// Throws CheckpointError for a folder that is no checkpoint, or a damaged one.
void run_inspect(const InspectArguments& arguments);

}  // namespace ragged::cli
