// One optimizer for a whole tree: rules (param_rules.h) deal the parameters out, and what comes back steps them all.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ragged/optim/adamw.h"
#include "ragged/optim/adamw8bit.h"
#include "ragged/optim/muon.h"
#include "ragged/optim/optimizer.h"
#include "ragged/optim/param_rules.h"
#include "ragged/optim/soap.h"

namespace ragged::optim {

struct OptimizerSpec {
  std::string kind = "adamw";         // of what no rule sends elsewhere
  std::vector<ParamRule> rules = {};  // after default_rules(kind)
  double lr = 1e-3;                   // of all; a rule's lr_scale goes on top
  /// Settings of each kind. Their lr, policy and row ranges are filled in from the above.
  AdamWOptions adamw = {};
  AdamW8bitOptions adamw8bit = {};
  MuonOptions muon = {};
  SoapOptions soap = {};
};

/// Name and global shape of what the tree holds, in its order.
std::vector<ParamFacts> param_facts(fsdp::Unit& root);

/// An optimizer a kind that got parameters, over disjoint sets, as one: steps run in the order of optimizer_kinds(),
/// states, steps and table come in the tree's order. Collective where a kind's constructor is. Throws InvalidArgument,
/// before any communication, for what resolve() refuses.
std::unique_ptr<Optimizer> make_optimizer(std::shared_ptr<fsdp::Unit> root, const OptimizerSpec& spec);

}  // namespace ragged::optim
