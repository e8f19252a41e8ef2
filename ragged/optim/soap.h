// SOAP over a tree of units: the matrices among its parameters, with states that live whole on each matrix's root. The
// step itself is SoapPlan's (soap_plan.h); this adds the tree, the policy and the states.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "ragged/fsdp/unit.h"
#include "ragged/optim/optimizer.h"
#include "ragged/optim/soap_plan.h"

namespace ragged::optim {

struct SoapOptions {
  double lr = 3e-3;
  double weight_decay = 0.01;
  SoapMath math{};
  SoapMovement movement{};
  /// Which parameters are SOAP's; none: default_muon_policy(), hidden matrices.
  ParamPolicy policy{};
  /// Row ranges of fused projections (see MatrixParam); none, and an empty answer: a matrix is one. Sees name and
  /// global shape; must answer alike on all ranks.
  std::function<std::vector<layout::Interval>(const buffer::ShardedTensor&)> row_ranges{};
};

/// A parameter without gradient is untouched, its count of steps included. States by matrix: "<p>.L", ".R", ".Q_L",
/// ".Q_R", ".exp_avg" and ".exp_avg_sq" of fp32, those of a stack or of row ranges "<p>.<number of the matrix>.L"; of a
/// side without a basis there are none. One rank of the shard group holds all of a state, the others nothing, which is
/// a RaggedShard with one owner: checkpoints take it as they take any placement, and another number of ranks, with
/// other roots, loads it.
class Soap : public Optimizer {
 public:
  /// Collective where a group has several ranks. Throws InvalidArgument, alike on all ranks, on options out of range, a
  /// policy that takes nothing, a parameter below two dims, or a state format other than fp32; masters that aren't
  /// fp32.
  Soap(std::shared_ptr<fsdp::Unit> root, SoapOptions options);
  ~Soap() override;

  /// Collective; see SoapPlan::step().
  void step(const StepScale& scale = {}) override;
  void set_lr(double lr) override;
  double lr() const override;
  std::vector<buffer::ShardedTensor> states() const override;
  std::vector<std::int64_t> steps() const override;
  void set_steps(const std::vector<std::int64_t>& steps) override;
  std::vector<OptimizerRow> table() const override;

  const SoapPlan& plan() const;
  /// By matrix of the plan; tensors on its root alone.
  const std::vector<SoapState>& matrix_states() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ragged::optim
