// The parameters of a tree that one optimizer steps: which those are, their settings and counts of steps, and this
// rank's pieces of masters and gradients. Not for users: what the optimizers have in common.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ragged/fsdp/unit.h"
#include "ragged/optim/adamw_step.h"
#include "ragged/optim/optimizer.h"
#include "ragged/optim/tile_codes.h"

namespace ragged::optim {

struct OwnedParam {
  buffer::ShardedTensor tensor;  // `local` is a view of the masters
  std::size_t position = 0;      // in the tree's sharded_parameters()
  std::size_t shard = 0;         // in its flat_shards(), and the piece there
  std::size_t piece = 0;
  layout::Interval local;  // of the flat shard
  double lr_scale = 1.0;
  double weight_decay = 0.0;
  std::string state_format;  // none of its own: empty
  std::int64_t steps = 0;
};

class OwnedParams {
 public:
  /// Asks `policy` (none: takes everything) about each parameter. `weight_decay` is that of two and more dims.
  /// Throws InvalidArgument, `optimizer` in its text, for settings out of range, a policy that takes nothing, and
  /// masters that aren't fp32.
  OwnedParams(std::shared_ptr<fsdp::Unit> root, const ParamPolicy& policy, double weight_decay, std::string optimizer);

  std::vector<OwnedParam>& list() { return list_; }
  const std::vector<OwnedParam>& list() const { return list_; }

  /// Calls `visit` for each of them that has a gradient, with its number in list(), in the order in which they lie in
  /// memory, after counting the step; afterwards the tree knows that masters changed.
  void for_each_gradient(
      const std::function<void(std::size_t, const at::Tensor& param, const at::Tensor& grad)>& visit);
  /// Numbers in list() in the order in which they lie in memory, shard by shard.
  const std::vector<std::size_t>& in_memory_order() const { return memory_order_; }

  std::vector<std::int64_t> steps() const;
  void set_steps(const std::vector<std::int64_t>& steps);
  /// Of the parameter's next constants: `rates` with its own scale and decay.
  AdamWStep constants(const OwnedParam& param, AdamWRates rates) const;

  fsdp::Unit& root() const { return *root_; }

 private:
  std::shared_ptr<fsdp::Unit> root_;
  std::string optimizer_;
  std::size_t tree_size_ = 0;
  std::vector<OwnedParam> list_;
  std::vector<std::size_t> memory_order_;
};

/// "fp32" or "bf16".
const char* moment_format(at::ScalarType dtype);
/// "power 32x32" or "dynamic 32x32".
const char* tile_format_name(TileFormat format);

/// Two moments of each of some parameters, zero, in the parameters' order in memory, so that what neighbours in the
/// masters does so here.
struct Moments {
  at::Tensor exp_avg;  // 1-D views; empty where the rank owns nothing
  at::Tensor exp_avg_sq;
};
/// By number in list(); undefined for those where `dtype_of` answers none.
std::vector<Moments> make_moments(
    const OwnedParams& params, const std::function<std::optional<at::ScalarType>(const OwnedParam&)>& dtype_of);

/// Elements of a parameter that each of the `ranks` of its shard group holds.
std::vector<layout::Interval> held_by_rank(const buffer::ShardedTensor& tensor, int ranks);

/// How a state of another shape lies: cut where its parameter is cut.
struct StateLayout {
  std::vector<Index> shape;
  std::vector<layout::Placement> placements;
  layout::Interval owned;
};
/// `of` says which elements of the state go with an interval of the parameter's. It is asked about all ranks'
/// intervals, so that what it throws all throw.
StateLayout layout_beside(
    const buffer::ShardedTensor& param, std::vector<Index> shape,
    const std::function<layout::Interval(layout::Interval)>& of);
/// Scales of 8-bit states, one a tile. Throws InvalidArgument where the tree's plan cuts tiles on any rank.
StateLayout layout_of_scales(const buffer::ShardedTensor& param);

/// A state that lies like its parameter.
buffer::ShardedTensor state_like(const OwnedParam& param, const char* suffix, const at::Tensor& local);
/// One that lies as `layout` says.
buffer::ShardedTensor state_beside(
    const OwnedParam& param, const char* suffix, const at::Tensor& local, const StateLayout& layout);

}  // namespace ragged::optim
