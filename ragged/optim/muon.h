// Muon over a tree of units: the matrices among its parameters, with momentum as ordinary sharded tensors. The step
// itself is MuonPlan's (muon_plan.h); this adds the tree, the policy and the states.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "ragged/fsdp/unit.h"
#include "ragged/optim/muon_plan.h"
#include "ragged/optim/optimizer.h"

namespace ragged::optim {

struct MuonOptions {
  double lr = 1e-3;
  double weight_decay = 0.1;
  MuonMath math{};
  MuonMovement movement{};
  /// "fp32", "bf16", or 8 bits in tiles as "power" or "dynamic" ([Note: tile codes] in tile_codes.h), for which a rank
  /// must hold whole tiles (tile_rows_policy()). ParamSettings::state_format goes before it.
  std::string momentum_format = "fp32";
  /// Which parameters are Muon's; none: default_muon_policy().
  ParamPolicy policy{};
  /// Row ranges of fused projections (see MuonParam); none, and an empty answer: a matrix is one. Sees name and global
  /// shape; must answer alike on all ranks.
  std::function<std::vector<layout::Interval>(const buffer::ShardedTensor&)> row_ranges{};
  /// Which parameters [out, ...] are one matrix of out rows instead of a stack of what their last two dims are; none:
  /// those of four dims and more, the weights of convolutions. Must answer alike on all ranks.
  std::function<bool(const buffer::ShardedTensor&)> flattens{};
};

/// Takes hidden matrices and stacks of them: two dims and more, and no part of the name that says embedding, head,
/// router or gate ("embed", "wte", "wpe", "head", "lm_head", "output", "unembedding", "router", "gate").
ParamSettings default_muon_policy(const buffer::ShardedTensor& param);

/// A parameter without gradient is untouched, its count of steps included. States by parameter: "<p>.momentum", laid
/// out as the parameter is; in 8 bits "<p>.momentum.codes", uint8, and "<p>.momentum.scales", fp32, one a tile. With
/// MuonMath::normuon also "<p>.row_exp_avg_sq", fp32, one a row, where the row begins.
class Muon : public Optimizer {
 public:
  /// Collective where a group has several ranks. Throws InvalidArgument, alike on all ranks, on options out of range, a
  /// policy that takes nothing or a parameter below two dims, masters that aren't fp32, and momenta in 8 bits whose
  /// tiles the tree's plan cuts on any rank.
  Muon(std::shared_ptr<fsdp::Unit> root, MuonOptions options);
  ~Muon() override;

  /// Collective; see MuonPlan::step().
  void step(const StepScale& scale = {}) override;
  void set_lr(double lr) override;
  double lr() const override;
  std::vector<buffer::ShardedTensor> states() const override;
  std::vector<std::int64_t> steps() const override;
  void set_steps(const std::vector<std::int64_t>& steps) override;
  std::vector<OptimizerRow> table() const override;

  const MuonPlan& plan() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ragged::optim
