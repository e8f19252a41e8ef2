// `ragged plan`: a model's layout before a launch.
#pragma once

#include <string>

#include "ragged/base/math.h"

namespace ragged::cli {

/// What the commands that plan have in common.
struct LayoutArguments {
  std::string model;
  int ranks = 0;
  Index rows = 1;
  bool flat_rows = false;
  Index ragged_blocks = -1;  // -1: the planner's default
  int layers_per_bucket = 1;
  bool json = false;
  std::string svg;  // file to write, if any
};

struct PlanArguments {
  LayoutArguments layout;
  std::string strategy = "auto";
  bool compare = false;
};

void run_plan(const PlanArguments& arguments);

}  // namespace ragged::cli
