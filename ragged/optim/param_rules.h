// Which optimizer takes which parameter, and with what settings: rules by regular expression over full names. Pure, on
// names and global shapes, so that all ranks decide alike before anything is allocated; make_optimizer.h acts on it.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ragged/base/math.h"

namespace ragged::optim {

/// "adamw", "adamw8bit", "muon".
std::span<const std::string_view> optimizer_kinds();

/// A rule sets what it names and leaves the rest as earlier rules had it: later ones win.
struct ParamRule {
  std::string match = {};  // ECMAScript, found anywhere in the name: "^layers\\.0\\." or "norm"
  std::optional<std::string> kind = {};
  std::optional<double> lr_scale = {};  // factor on the learning rate
  std::optional<double> weight_decay = {};
  std::optional<std::string> state_format = {};
  /// Rows of the matrices that a fused weight is made of, in order; each is orthogonalised by itself. They sum to the
  /// rows of the parameter (of one matrix of a stack). Empty: one matrix.
  std::optional<std::vector<Index>> splits = {};
  /// Only parameters of at most so many dims.
  std::optional<Index> max_dims = {};

  friend bool operator==(const ParamRule&, const ParamRule&) = default;
};

/// What a rule is held against.
struct ParamFacts {
  std::string name;
  std::vector<Index> shape;
};

/// What the rules come to for one parameter.
struct ParamChoice {
  std::string kind;
  double lr_scale = 1.0;
  std::optional<double> weight_decay = {};       // none: the optimizer's own
  std::optional<std::string> state_format = {};  // none: the optimizer's own
  std::vector<Index> splits = {};

  friend bool operator==(const ParamChoice&, const ParamChoice&) = default;
};

/// What holds before a user's rules where `kind` is the optimizer: embeddings, head, norms, biases, routers and 1-D
/// parameters go from the matrix optimizers to AdamW; stacked biases don't decay, and have states in fp32.
std::vector<ParamRule> default_rules(std::string_view kind);

/// One choice a parameter, in order. Throws InvalidArgument, naming rule or parameter and a remedy, for an unknown
/// kind, a bad regular expression, one of `rules` that matches no parameter (a default rule may), numbers out of range,
/// a parameter of fewer than two dims sent to Muon, and splits that don't fit.
std::vector<ParamChoice> resolve(
    std::string_view kind, std::span<const ParamRule> rules, std::span<const ParamFacts> params);

/// Nothing is known of parameters yet: the checks that need none. `where` names the rule: "optimizer.rules[2]".
void check_rule(const ParamRule& rule, std::string_view where);

/// "match 'norm': kind adamw, weight_decay 0".
std::string to_string(const ParamRule& rule);

}  // namespace ragged::optim
