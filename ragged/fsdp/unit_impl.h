// Inside of Unit, for the two files that implement it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ragged/fsdp/runtime.h"
#include "ragged/fsdp/unit.h"

namespace ragged::fsdp {

struct Unit::Impl {
  std::vector<torch::nn::Module*> modules;
  FullyShardOptions options;
  RuntimeOptions runtime_options;  // of a root
  std::shared_ptr<ParamGroup> group;
  std::vector<std::shared_ptr<Unit>> children;
  Unit* parent = nullptr;
  std::shared_ptr<Runtime> runtime;  // the root's, shared by its tree once it exists
  int index = 0;                     // in the runtime
  std::string name;

  bool contains(const torch::nn::Module* module) const;
};

}  // namespace ragged::fsdp
