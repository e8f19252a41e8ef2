// AdamW with 8-bit moments over the flat shards of a tree of units. Moments are quantised in 32 x 32 tiles of each
// matrix, and a rank owns whole tiles, so a step needs no communication, and given equal gradients the result, states
// included, is equal bit for bit for every world size and layout.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ragged/fsdp/options.h"
#include "ragged/fsdp/unit.h"
#include "ragged/optim/optimizer.h"

namespace ragged::optim {

struct AdamW8bitOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;  // of parameters of two and more dims
  /// "power" or "dynamic" ([Note: tile codes] in tile_codes.h): of parameters that are kept in 8 bits.
  std::string state_format = "power";
  /// false: without the guards against lost second moments, as others' 8-bit Adam is.
  bool guards = true;
  /// Which parameters it steps, and how they differ; its state_format, "fp32", "power" or "dynamic", goes before
  /// keeps_fp32(). None: all of them.
  ParamPolicy policy{};
};

/// States in 8 bits: "<parameter>.exp_avg.codes" and ".exp_avg_sq.codes", uint8 of the parameter's shape and placement;
/// ".exp_avg.scales" and ".exp_avg_sq.scales", fp32, one a tile (scales_shape() in tile_geometry.h), cut where the
/// parameter is cut. States in fp32: as AdamW's. All exist on all ranks from construction. Not collective.
class AdamW8bit : public Optimizer {
 public:
  /// Throws InvalidArgument, alike on all ranks, on options and settings out of range, masters that aren't fp32, and
  /// parameters in 8 bits whose tiles the tree's plan cuts on any rank.
  AdamW8bit(std::shared_ptr<fsdp::Unit> root, AdamW8bitOptions options);
  ~AdamW8bit() override;
  AdamW8bit(AdamW8bit&&) noexcept;
  AdamW8bit& operator=(AdamW8bit&&) noexcept;

  void step(const StepScale& scale = {}) override;
  void set_lr(double lr) override;
  double lr() const override;

  std::vector<buffer::ShardedTensor> states() const override;
  std::vector<std::int64_t> steps() const override;
  void set_steps(const std::vector<std::int64_t>& steps) override;
  std::vector<OptimizerRow> table() const override;

  /// Gradient elements that weren't finite so far, on this rank, of parameters in 8 bits: each made its parameter NaN
  /// and left its moments and scales alone. StepScale::skip, where the gradient norm isn't finite, keeps both.
  Index non_finite_gradients() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Whether a parameter's states stay fp32 by default: fewer than two dims, fewer than 4096 elements, an embedding or
/// an output head by the name of its module ("embed" in it; wte, wpe, head, or one that ends in _head). By global
/// shape.
bool keeps_fp32(const buffer::ShardedTensor& param);

/// rows(32), or all rows of matrices that have fewer, for parameters of two and more dims; the default for others.
fsdp::ShardPolicy tile_rows_policy();

}  // namespace ragged::optim
