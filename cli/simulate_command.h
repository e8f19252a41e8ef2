// `ragged simulate`: memory and time of one step before a launch.
#pragma once

#include <string>

#include "plan_command.h"
#include "ragged/sim/step.h"

namespace ragged::cli {

struct SimulateArguments {
  LayoutArguments layout;
  std::string device = "h100";  // a preset or a file
  Index tokens = 8192;
  Index sequence = 0;
  int shard = 0;  // ranks that share a copy; 0: all
  std::string optimizer = "adamw";
  std::string checkpointing = "full";
  bool keep_gathered = false;
  int prefetch = 1;
  std::string reduce_dtype = "fp32";
  std::string trace;  // file to write, if any
};

/// Of one shard group. Throws InvalidArgument that names the option.
sim::StepRequest step_request(const SimulateArguments& arguments);

void run_simulate(const SimulateArguments& arguments);

}  // namespace ragged::cli
