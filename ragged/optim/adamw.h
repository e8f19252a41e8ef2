// AdamW over the flat shards of a tree of units: one fused pass over all of them, no per-parameter tensors. Given equal
// gradients the result is equal bit for bit for every world size and layout.
#pragma once

#include <memory>
#include <vector>

#include "ragged/fsdp/unit.h"
#include "ragged/optim/optimizer.h"

namespace ragged::optim {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;  // of parameters of two and more dims
  /// Moments in bf16 halve their memory. A policy's state_format "fp32" or "bf16" goes before it.
  at::ScalarType moment_dtype = at::kFloat;
  /// Which parameters it steps, and how they differ. None: all of them alike.
  ParamPolicy policy{};
};

/// Holds two moments a parameter element of this rank's shard, named "<parameter>.exp_avg" and
/// "<parameter>.exp_avg_sq". A parameter without gradient is untouched, decay included, and its step count stays. Not
/// collective.
class AdamW : public Optimizer {
 public:
  /// Throws InvalidArgument on options and settings out of range or masters that aren't fp32.
  AdamW(std::shared_ptr<fsdp::Unit> root, AdamWOptions options);
  ~AdamW() override;
  AdamW(AdamW&&) noexcept;
  AdamW& operator=(AdamW&&) noexcept;

  void step(const StepScale& scale = {}) override;
  void set_lr(double lr) override;
  double lr() const override;

  std::vector<buffer::ShardedTensor> states() const override;
  std::vector<std::int64_t> steps() const override;
  void set_steps(const std::vector<std::int64_t>& steps) override;
  std::vector<OptimizerRow> table() const override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ragged::optim
