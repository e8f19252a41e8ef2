// Drives a tree of units through a step: who gathers when, what is prefetched, which collective comes next in
// backward, what the sweep at its end still has to do. One a root; holds no tensors of its own but the pool.
//
// [Note: the step]
// Forward: before a unit, its image is gathered and waited for (and the next ones issued, where asked); after it the
// image is dropped. Backward is driven by the issue list (issue_list.h) of the forward it belongs to: a gradient that
// reaches a unit's outputs moves the cursor to its gather, gradients that reach its inputs to its reduction. The
// latter may never happen (no input needs a gradient), and the list's tail belongs to nobody, so the sweep, a callback
// at the end of the outermost backward, works off the rest, waits for all reductions, learns which parameters any
// rank used, and publishes gradients. If backward throws, the sweep never runs; the next forward then finds a
// backward that began without end and recovers.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ragged/fsdp/forecast.h"
#include "ragged/fsdp/forward_record.h"
#include "ragged/fsdp/param_group.h"
#include "ragged/fsdp/tensor_refs.h"

namespace ragged::fsdp {

/// A unit as the runtime sees it; index 0 is the root, parents come before their children.
struct RuntimeUnit {
  std::string name;
  int parent = -1;
  std::shared_ptr<ParamGroup> group;  // null: no parameters of its own
  MixedPrecision mixed_precision;
  bool has_explicit_reshard = false;
};

/// Not thread-safe; autograd may call its hooks from its own thread while the driving thread waits.
class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  Runtime(std::vector<RuntimeUnit> units, comm::MeshGroups groups, RuntimeOptions options);
  ~Runtime();

  const std::vector<RuntimeUnit>& units() const { return units_; }
  RuntimeUnit& unit(int index) { return units_[static_cast<std::size_t>(index)]; }
  const comm::MeshGroups& groups() const { return groups_; }
  RuntimeOptions options;

  // --- the four events; see [Note: the step] ---
  /// Returns the call's index in the open record, -1 without grad mode.
  int pre_forward(int unit, const TensorRefs& inputs);
  void post_forward(int unit, int call, const TensorRefs& outputs);
  /// The forward threw.
  void abort_forward(int unit, int call) noexcept;

  /// Ranks agree on plans, and where users initialised, on values. Collective; runs once, before the first gather.
  void check_ranks_agree();
  /// Waits for what is in flight and drops everything half done.
  void reset();

  buffer::BufferPool& pool() const { return *pool_; }
  StepForecast forecast(int micro_batches, bool sync_each) const;

 private:
  using Record = std::shared_ptr<ForwardRecord>;

  void make_slots();
  void begin_forward();
  void end_forward();
  void prefetch_forward(int unit);
  bool needs_backward(int unit, const TensorRefs& inputs) const;

  void pre_backward(const Record& record, int call);
  void post_backward(const Record& record, int call);
  void gradient_ready(int unit, int param);
  void activate(const Record& record);
  void advance(ForwardRecord& record, int target, bool skip_gathers = false);
  void issue_reduction(int unit);
  void sweep();
  void publish_gradients();
  bool backward_failed() const;
  ParamGroup::GradientReady gradient_hook(int unit);

  std::vector<RuntimeUnit> units_;
  std::vector<char> subtree_trains_;
  comm::MeshGroups groups_;
  std::shared_ptr<buffer::BufferPool> pool_;
  std::optional<c10::Stream> gather_stream_;
  bool checked_ = false;

  bool in_forward_ = false;
  Record record_;  // of the forward that is running
  int next_record_ = 0;
  std::vector<int> last_order_;  // units in the order the last forward began them
  std::vector<int> order_;       // of the forward that is running
  std::size_t prefetched_ = 0;   // how far into last_order_ gathers were issued

  int backward_task_ = -1;  // autograd's id of the running backward
  std::vector<Record> active_;
  std::vector<int> pending_reductions_;  // by unit: entries of active records still ahead of the cursor
  std::vector<int> reduced_;             // units with a reduction in this backward, in order of issue
  int scattering_ = -1;                  // the unit whose reduce-scatter is in flight
  int all_reducing_ = -1;
};

}  // namespace ragged::fsdp
