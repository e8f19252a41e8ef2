// What all optimizers over a tree of units share: the step, its scale, their states, and one line a parameter about
// how it is optimised. Everything is decided from global shapes and names, so that all ranks decide alike.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ragged/buffer/sharded_tensor.h"

namespace ragged::optim {

/// What one step does to the gradients before anything else, without a pass of its own.
struct StepScale {
  double grad = 1.0;  // factor on every gradient: the clip factor, the inverse of a loss scale
  bool skip = false;  // change nothing: not the moments, not the counts of steps
};

/// How one parameter differs from the rest.
struct ParamSettings {
  bool takes = true;                             // false: another optimizer steps it
  double lr_scale = 1.0;                         // factor on the learning rate
  std::optional<double> weight_decay = {};       // none: the optimizer's own for two and more dims, 0 below
  std::optional<std::string> state_format = {};  // none: the optimizer's own choice; see its options
};
/// Sees name and global shape. Must answer alike on all ranks.
using ParamPolicy = std::function<ParamSettings(const buffer::ShardedTensor&)>;

/// One parameter in the table that is printed before training.
struct OptimizerRow {
  std::string name;
  std::vector<Index> shape;
  std::string optimizer;     // "adamw", "adamw8bit", "muon", ...
  std::string state_format;  // "fp32", "bf16", "power 32x32", ...
  std::string block;         // what stays on one rank: "element", "32 rows", "matrix"
  Index state_bytes = 0;     // on this rank
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;

  /// One step with the gradients that the tree holds now. A parameter without gradient is untouched, its count of
  /// steps included. Collective where the class says so.
  virtual void step(const StepScale& scale = {}) = 0;
  virtual void set_lr(double lr) = 0;
  virtual double lr() const = 0;

  /// Everything that a continued run needs, as sharded tensors named "<parameter>.<state>". Views: what is written to
  /// them is used from the next step on.
  virtual std::vector<buffer::ShardedTensor> states() const = 0;
  /// Steps taken by parameter, in the order of the tree's sharded_parameters(); 0 for those another one steps.
  virtual std::vector<std::int64_t> steps() const = 0;
  virtual void set_steps(const std::vector<std::int64_t>& steps) = 0;
  /// The parameters that this one steps, in the tree's order.
  virtual std::vector<OptimizerRow> table() const = 0;
};

}  // namespace ragged::optim
