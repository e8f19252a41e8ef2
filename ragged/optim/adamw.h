// AdamW over the flat shards of a tree of units: one fused pass a span, no per-parameter tensors. Given equal
// gradients the result is equal bit for bit for every world size and layout.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ragged/fsdp/unit.h"

namespace ragged::optim {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  /// Which parameters decay; none: those of two and more dims. Sees the global shape, so all ranks decide alike.
  std::function<bool(const buffer::ShardedTensor&)> decays{};
  /// Moments in bf16 halve their memory; none: the parameters' dtype.
  at::ScalarType moment_dtype = at::kFloat;
};

/// Holds two moments a parameter element of this rank's shard. A parameter without gradient is untouched, decay
/// included, and its step count stays.
class AdamW {
 public:
  /// Throws InvalidArgument on options out of range or masters that aren't fp32.
  AdamW(std::shared_ptr<fsdp::Unit> root, AdamWOptions options);
  ~AdamW();
  AdamW(AdamW&&) noexcept;
  AdamW& operator=(AdamW&&) noexcept;

  void step();
  void set_lr(double lr);
  double lr() const;

  /// First and second moments as sharded tensors named "<parameter>.exp_avg" and "<parameter>.exp_avg_sq".
  std::vector<buffer::ShardedTensor> states() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ragged::optim
