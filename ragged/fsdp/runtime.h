// Drives a tree of units through a step: who gathers when, what is prefetched, which collective comes next in
// backward, what the sweep at its end still has to do. One a root; holds no tensors of its own but the pool.
//
// [Note: the step]
// Forward: before a unit, its image is gathered and waited for (and the next ones issued, where asked); after it the
// image is dropped. Backward is driven by the issue list (issue_list.h) of the forward it belongs to: a gradient that
// reaches a unit's outputs moves the cursor to its gather, gradients that reach its inputs to its reduction. The
// latter may never happen (no input needs a gradient), and the list's tail belongs to nobody, so the sweep, a callback
// at the end of the outermost backward, works off the rest, waits for all reductions, learns which parameters any
// rank used, and publishes gradients. If backward throws, autograd drops the sweep's callback unrun, and with it the
// token that it holds: so a failed backward is known, even among nested ones, and the next forward recovers.
//
// [Note: recomputation]
// Activation checkpointing around a unit runs its forward again inside backward. If backward has reached the call, its
// parameters are there. If not (the region around it is recomputed as a whole, or its first forward ran without
// recording) they are gathered outside the list, at a point that is the same on all ranks, and the new graph gets the
// hooks of the call that it repeats.
//
// [Note: images that nobody holds]
// A unit with units inside (the root: embedding, norm and head) keeps its image from its forward to the end of its
// backward, beside those of all the others. Most of that time nobody needs it: the head's backward is done before that
// of the last block begins, and an embedding's needs no weights. Autograd tells, since each tensor that a graph saved
// holds a reference. So where free memory is given back (FreeSlots::kReturn), each time backward enters an inner unit,
// images of units around it go whose parameters nobody holds. That is a matter of this rank alone: lists of issues take
// such an image for one that is there, and the next forward gathers it as it would have anyway. What no reference tells
// of is a region under activation checkpointing that is yet to run again: a front that knows of modules in it asks for
// unshard_again() before they run, on all ranks, whether or not a rank still has the image.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ragged/fsdp/forecast.h"
#include "ragged/fsdp/forward_record.h"
#include "ragged/fsdp/merge.h"
#include "ragged/fsdp/param_group.h"
#include "ragged/fsdp/tensor_refs.h"

namespace ragged::fsdp {

/// A unit as the runtime sees it; index 0 is the root, parents come before their children.
struct RuntimeUnit {
  std::string name;
  int parent = -1;
  std::vector<std::shared_ptr<ParamGroup>> groups{};  // one a dtype and mesh; empty: no parameters of its own
  MixedPrecision mixed_precision{};
  std::vector<int> forward_prefetch{};   // units gathered with it in forward, besides those RuntimeOptions names
  std::vector<int> backward_prefetch{};  // in backward, instead of those
  bool unshard_in_backward = true;

  bool trains() const;
  bool reshards_after_forward() const { return !groups.empty() && groups.front()->reshard_after_forward; }
  bool is_sharded() const { return groups.empty() || groups.front()->is_logically_sharded(); }
};

/// Not thread-safe; autograd may call its hooks from its own thread while the driving thread waits.
class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  /// `shares`: another root whose pool and stream serve this one too (pipeline stages on one rank); may be null.
  Runtime(
      std::vector<RuntimeUnit> units, comm::MeshGroups groups, RuntimeOptions options, const Runtime* shares = nullptr);
  ~Runtime();

  const std::vector<RuntimeUnit>& units() const { return units_; }
  RuntimeUnit& unit(int index) { return units_[static_cast<std::size_t>(index)]; }
  const comm::MeshGroups& groups() const { return groups_; }
  RuntimeOptions options;  // none is left open but merge_bytes
  /// Throws InvalidArgument for options that the device can't have.
  void set_options(const RuntimeOptions& value);
  /// false: the sweep leaves reductions in flight and publishes nothing; a later backward's does.
  bool is_last_backward = true;

  // --- the four events; see [Note: the step] ---
  void pre_forward(int unit, const TensorRefs& inputs);
  /// Ends the innermost open forward of this unit. `may_reshard`: false while modules that share the unit are to run.
  void post_forward(int unit, const TensorRefs& outputs, bool may_reshard = true);
  /// The forward threw.
  void abort_forward(int unit) noexcept;

  /// Ranks agree on plans, and where users initialised, on values. Collective; runs once, before the first gather.
  void check_ranks_agree();
  /// Gathers a unit outside of any forward; wait_for_unshard() makes it usable. Collective.
  void unshard(int unit);
  void wait_for_unshard(int unit);
  void reshard(int unit);
  /// Before one of the unit's modules runs again inside backward; see [Note: images that nobody holds]. Collective if
  /// backward has entered a unit inside this one.
  void unshard_again(int unit);
  /// What backwards left undone: reduces gradients that were kept unsynchronised (where units synchronise by now),
  /// publishes all, and reshards. Collective; the same on all ranks, which ran the same units.
  void finish_backward();
  /// Waits for what is in flight and drops everything half done.
  void reset();

  buffer::BufferPool& pool() const { return *pool_; }
  StepForecast forecast(int micro_batches, bool sync_each) const;

 private:
  using Record = std::shared_ptr<ForwardRecord>;
  /// A forward that has begun: of the current record, or (recomputes) of one that backward is in.
  struct OpenCall {
    int unit = 0;
    int call = -1;  // in `record`; -1: nothing to hook
    Record record;
    comm::compat::NodePtr inputs;
    bool recomputes = false;
    bool reached = false;  // backward had reached the call before
    bool stays = false;    // the parameters were there before, and are wanted after
  };

  void make_slots();
  void begin_forward();
  void end_forward();
  void gather_in_forward(int unit);
  void prefetch_forward(int unit);
  bool needs_backward(int unit, const TensorRefs& inputs) const;
  void mark_call(OpenCall& open, const TensorRefs& inputs);
  void hook_call(const OpenCall& open, const TensorRefs& outputs);
  void begin_recomputation(int unit, const TensorRefs& inputs);
  void drop_open_call();

  void pre_backward(const Record& record, int call);
  void post_backward(const Record& record, int call);
  void gradient_ready(int unit, int group, int param, ParamGroup::GradientEvent event);
  void activate(const Record& record);
  void drop_unheld_images(const ForwardRecord& record, int entered);
  void advance(ForwardRecord& record, int target, bool skip_gathers = false);
  enum class Part { kAll, kBehind };  // kAll: less what was reduced as kBehind in this backward
  void issue_reduction(int unit, Part part);
  void finish_units(const std::vector<int>& units);
  void sweep();
  void publish_gradients();
  void exchange_used(const std::vector<ParamGroup*>& groups, std::vector<char>& used) const;
  void reduce_latecomers(const std::vector<ParamGroup*>& groups, const char* is_late);
  bool backward_is_running() const { return backward_open_ && !backward_alive_.expired(); }
  bool backward_failed() const { return backward_open_ && backward_alive_.expired(); }
  ParamGroup::GradientReady gradient_hook(int unit, int group);

  // --- several units in one collective (runtime_merge.cpp) ---
  Index merge_limit() const;
  MergeTraits gather_merge(const RuntimeUnit& unit) const;
  MergeTraits reduce_merge(const RuntimeUnit& unit) const;
  bool is_small(MergeTraits traits) const { return traits.kind >= 0 && traits.bytes <= merge_limit(); }
  void unshard_in_order(int unit, std::size_t position);
  void unshard_together(const std::vector<int>& units);
  void issue_collected_reductions();

  std::vector<RuntimeUnit> units_;
  std::vector<char> subtree_trains_;
  comm::MeshGroups groups_;
  std::shared_ptr<buffer::BufferPool> pool_;
  std::optional<c10::Stream> gather_stream_;
  bool checked_ = false;

  std::vector<OpenCall> open_;  // forwards that have begun and not ended, outermost first
  Record record_;               // of the forward that is running
  int next_record_ = 0;
  std::vector<int> last_order_;  // units in the order the last forward began them
  std::vector<int> order_;       // of the forward that is running
  std::size_t prefetched_ = 0;   // how far into last_order_ gathers were issued
  std::vector<int> gathered_ahead_;

  bool backward_open_ = false;          // began, and its sweep hasn't run
  std::weak_ptr<void> backward_alive_;  // held by the sweep's callback
  std::vector<Record> active_;
  std::vector<int> active_calls_;        // by unit: its calls in those
  int backward_task_ = -1;               // of autograd's: the outermost
  std::vector<int> pending_reductions_;  // by unit: entries of active records still ahead of the cursor
  std::vector<char> unreduced_;          // by unit: a backward kept its gradients in the reduce buffer
  std::vector<char> behind_reduced_;     // by unit: its kBehind was reduced in this backward
  std::vector<int> reduced_;             // units with a reduction that isn't published, in order of issue
  int scattering_ = -1;                  // the unit whose reduce-scatter is in flight
  int all_reducing_ = -1;
  std::vector<int> collected_;  // units that are reduced with the next one in the list
  std::vector<int> merged_;     // units whose common reduce-scatter is in flight
};

}  // namespace ragged::fsdp
