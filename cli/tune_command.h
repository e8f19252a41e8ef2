// `ragged tune`: how to shard and run a model on so many ranks.
#pragma once

#include <string>

#include "simulate_command.h"

namespace ragged::cli {

struct TuneArguments {
  SimulateArguments step;
  std::string memory;  // "80GiB"; empty: 90 % of the device's
  bool fixed_optimizer = false;
};

void run_tune(const TuneArguments& arguments);

}  // namespace ragged::cli
