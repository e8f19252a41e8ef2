// One unit's parameters at run time: the masters' shard, the image that comes and goes, the reduce buffer that
// gradients are cast into, and the gradient shard. It knows how to move between states; the Runtime decides when.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <c10/core/Stream.h>

#include "ragged/buffer/dbuffer.h"
#include "ragged/buffer/sharded_tensor.h"
#include "ragged/comm/compat.h"
#include "ragged/fsdp/options.h"

namespace ragged::fsdp {

/// kUnsharding: the gather is issued and not yet waited for.
enum class ShardState { kSharded, kUnsharding, kUnsharded };

struct ParamGroupSpec {
  std::string name;
  std::shared_ptr<const plan::BucketPlan> plan;
  comm::MeshGroups groups;
  at::ScalarType master_dtype = at::kFloat;
  at::ScalarType param_dtype = at::kFloat;
  at::ScalarType reduce_dtype = at::kFloat;
  /// Masters, gradients and with them optimizer states live in host memory; the image and reductions on the device.
  struct Offload {
    bool enabled = false;
    bool pin_memory = false;
  };
  Offload offload{};
  bool front_holds_values = false;  // GroupFront::gathers(): there are no masters
  /// The leaves that autograd sees, in plan order, over the image: see bind().
  std::vector<at::Tensor> params{};
};

/// What a front end whose parameters are objects of their own (Python) hangs on a group. C++ modules need none.
/// Called on the thread that drives the event, between ParamGroup's own steps; what it throws passes through.
class GroupFront {
 public:
  virtual ~GroupFront() = default;
  /// The front makes unsharded parameters by itself, from pieces that only it understands (tensor subclasses with a
  /// protocol of their own); the group then asks for them in these three, and has no image.
  virtual bool gathers() const { return false; }
  virtual void gather() {}
  /// Returns the leaves that autograd sees from now on, if they aren't those of before.
  virtual std::vector<at::Tensor> finish_gather() { return {}; }
  virtual void drop() {}
  /// The image is there: the module's parameters are the unsharded ones from now on.
  virtual void unsharded() = 0;
  /// They are the sharded ones again.
  virtual void sharded() = 0;
  /// requires_grad of the sharded parameters, as the user left it, is carried over to the unsharded ones.
  virtual void follow_requires_grad() = 0;
  /// The dense tensor inside the gradient of an unsharded parameter that is a tensor subclass.
  virtual at::Tensor dense_gradient(int param, const at::Tensor& grad) = 0;
  enum class Gradient { kNone, kPublished, kForeign };
  /// What the sharded parameter's .grad holds: nothing, what published() put there, or something of the user's.
  virtual Gradient gradient(int param) const = 0;
  /// The 1-D local part of a foreign one. Throws InvalidArgument where it doesn't fit.
  virtual at::Tensor foreign_gradient(int param) = 0;
  struct Published {
    int param = 0;
    at::Tensor local;       // the gradient as it is now, 1-D, a view of the gradient shard
    bool is_fresh = false;  // this backward added to it: hooks that wait for gradients run
  };
  /// No sharded parameter has a gradient any more: the shard's memory is wanted back.
  virtual void release_gradients() = 0;
  /// Objects of the front's own that hold the unsharded parameter; compared with what it was when nobody else did.
  virtual Index num_holders(int /*param*/) const { return 0; }
  /// All gradients of the group, whether they changed or merely moved.
  virtual void published(const std::vector<Published>& gradients) = 0;
};

/// The pool's size classes of a group, set once the whole tree is known (see [Note: slots]).
struct GroupSlots {
  std::shared_ptr<buffer::BufferPool> pool;
  int image = -1;
  int reduce = -1;
  int staging = -1;
  int gradient = -1;
  int kept = -1;
  /// Where gathers are issued, so that they don't queue behind compute; none on devices without streams.
  std::optional<c10::Stream> gather_stream{};
};

/// Transitions are idempotent. Not thread-safe.
class ParamGroup : public std::enable_shared_from_this<ParamGroup> {
 public:
  /// Takes this rank's part of the parameters' values (whole tensors, in plan order) into the masters. Values that are
  /// undefined or without bytes leave their masters to be initialised.
  ParamGroup(ParamGroupSpec spec, std::span<const at::Tensor> values);
  /// The same layout in other dtypes, without values and leaves: a layout doesn't depend on the dtype.
  std::shared_ptr<ParamGroup> converted(at::ScalarType master, at::ScalarType param, at::ScalarType reduce) const;
  /// These leaves are the parameters from now on; each must be image(i) or a tensor over it.
  void bind(std::vector<at::Tensor> params);
  void set_front(std::unique_ptr<GroupFront> front) { front_ = std::move(front); }
  GroupFront* front() const { return front_.get(); }
  /// Parameter i of the (dropped) image, in its own shape.
  at::Tensor image(int param) const { return image_->tensor(param); }

  const std::string& name() const { return spec_.name; }
  const plan::BucketPlan& plan() const { return *spec_.plan; }
  const ParamGroupSpec& spec() const { return spec_; }
  /// Fully qualified names, known once the root is: in errors, in profiles, in sharded tensors.
  void rename(std::string unit, const std::vector<std::string>& params);
  /// Whoever made the group and bound its parameters; found again by of() and unit().
  void set_unit(void* unit) { unit_ = unit; }
  void* unit() const { return unit_; }
  /// The group whose image holds this tensor's bytes; null for any other tensor.
  static ParamGroup* of(const at::Tensor& tensor);
  void set_slots(GroupSlots slots) { slots_ = std::move(slots); }
  Index image_bytes() const { return image_->nbytes(); }
  /// The image has the masters' dtype, so gathers read them (where the backend can): they must not change while one is
  /// in flight.
  bool gathers_from_masters() const;
  /// Gradients that are reduced in the backward which computed them travel in the image's dtype, narrower than the
  /// sum's and with its bits: see Communicator::sums_after_transfer(). (As in FSDP2, several addends of one backward
  /// are added up in that dtype.)
  bool narrows_gradients() const;
  Index reduce_bytes() const { return reduce_->nbytes(); }
  /// The dtype that gradients are in when they are reduced now.
  at::ScalarType addend_dtype() const { return narrows_now() ? spec_.param_dtype : spec_.reduce_dtype; }
  /// Most staging that a reduction of this group can need.
  Index staging_bytes() const;
  Index gradient_bytes() const { return grads_->nbytes(); }
  /// What a rank keeps of the image after reshard_to_small_group().
  Index kept_bytes() const;

  // --- image ---
  ShardState state() const { return state_; }
  /// Issues the gather unless the image is there and fresh. Collective.
  void unshard();
  void wait_for_unshard();
  void reshard();
  /// The same, but where a small group is set and the plan allows, its ranks keep the image among them, so that the
  /// next gather is theirs alone. The group's ranks must be consecutive in the shard group.
  void reshard_to_small_group();
  /// reshard() as soon as nobody holds a parameter: see [Note: images that nobody holds].
  void reshard_if_unheld();
  /// Gathers again after a reshard_if_unheld() that would have been allowed to drop the image, whether it did or not.
  void unshard_again();
  /// The next step's unshard() is still to come, though the image may be gone already.
  bool is_logically_sharded() const { return state_ == ShardState::kSharded && !may_be_gone_; }
  void set_small_group(comm::Communicator group) { small_group_ = std::move(group); }
  bool has_small_group() const { return small_group_.size() > 1; }

  // --- gradients ---
  enum class GradientEvent {
    kComplete,  // autograd is done with the parameter's gradient: answer with take_gradient()
    kInPlace,   // an addend is about to be written: throw if that isn't the time for it
  };
  using GradientReady = std::function<void(int param, GradientEvent)>;
  void hook_gradients(const GradientReady& ready);
  /// `.grad` of the module's parameter is cast into its slot, or added to what is there, and dropped.
  void take_gradient(int param);
  /// For operations that compute a gradient in its slot (gradients_in_place.h).
  enum class SlotState : char {
    kEmpty,    // whatever bytes are there
    kWritten,  // addends of the backward that runs, all by such operations
    kFilled,   // others
  };
  struct GradientSlot {
    at::Tensor tensor;  // the parameter's shape, the dtype it is reduced from; valid until the unit is reduced
    SlotState state = SlotState::kEmpty;
  };
  /// Whether `tensor` is a parameter of this group that may be written so; what it says holds until the next forward.
  bool takes_in_place(int param, const at::Tensor& tensor) const;
  /// The slot, made if need be. Throws InvalidArgument where the unit isn't in backward.
  /// `own_holders`: references to the parameter that the caller needs no more, see [Note: gradients over weights].
  GradientSlot gradient_slot(int param, Index own_holders);
  /// Between the two, the slot was written or added to. `how` is the counter that its bytes belong to.
  void wrote_slot(int param, Index buffer::ByteCounters::*how);
  /// Looks at requires_grad anew: where something was unfrozen, frozen segments get reduce buffers too. Returns whether
  /// anything trains.
  bool refresh_trainable(const GradientReady& ready);

  /// Issues the reduction of what the slots hold, zero where they hold nothing, and gives back what the one before
  /// needed. Collective over the shard group.
  void issue_reduction();
  /// Waits for the scatter; issues the all-reduce over replicas where one is due.
  void finish_scatter();
  /// Waits for all of it.
  void finish_reduction();

  // --- several groups in one collective: see [Note: merged collectives] in merge.h ---
  // On a CPU, in one shard group of at least two ranks that communicates by Gloo; at least two groups, none twice.
  /// unshard() of groups that are sharded and have one dtype of image. wait_for_unshard() of any waits for all.
  static void unshard_together(std::span<ParamGroup* const> groups);
  /// issue_reduction() of groups that reduce, in one dtype, and have no replicas. Their reduce buffers are free again
  /// when it returns; finish_scatter() of any waits for all.
  static void reduce_together(std::span<ParamGroup* const> groups);
  /// The last reduction is in the gradient shard; false where the sum over replicas is postponed.
  bool result_is_ready() const { return result_is_ready_; }
  /// By parameter: this rank had a gradient in the reductions since the last publish(), or has one that waits for a
  /// reduction. As bytes, for an all-reduce.
  std::vector<char> used() const;
  /// Gradients wait in the reduce buffer.
  bool has_unreduced() const;
  /// Backward left them there for a later one, on all ranks.
  void keep_unreduced() { accumulates_ = true; }
  /// By parameter: some rank did. Those have a gradient from now on.
  void publish(const char* used_by_any);

  bool has_grad(int param) const { return has_grad_[static_cast<std::size_t>(param)]; }
  void zero_grad();
  /// Looks at the front's gradients: forgets those that were cleared, and gives the memory back when all were.
  void follow_gradients();
  bool reduces() const { return reduced_segments_ > 0; }
  /// Drops everything half done, waiting for what is in flight; keeps masters and published gradients.
  void abandon();

  // --- for optimizers and checkpoints ---
  buffer::DBuffer& masters() { return *masters_; }
  buffer::DBuffer& grads() { return *grads_; }
  buffer::ShardedTensor sharded_parameter(int param, int unit) const;
  buffer::ShardedTensor sharded_gradient(int param, int unit) const;
  /// After writing to masters through raw pointers.
  void bump_master_version();
  void mark_initialised() { needs_values_.clear(); }
  /// Writes a parameter's local values, 1-D; after a load or an initialisation outside.
  void set_master(int param, const at::Tensor& local);
  /// Name of a parameter whose masters were never written; empty when there is none.
  const std::string& needs_values() const { return needs_values_; }
  /// Of all values as they were before sharding; equal on all ranks that were initialised alike.
  std::uint64_t checksum() const { return checksum_; }

  GradientsInPlace gradients_in_place = GradientsInPlace::kNo;
  GradientMemory gradient_memory = GradientMemory::kOwn;
  bool may_overwrite = false;  // by what is known of this backward alone; said before each gradient
  bool requires_gradient_sync = true;
  bool requires_all_reduce = true;
  bool reshard_after_forward = true;
  bool reshard_after_backward = true;
  /// The unit's bucket of what lies behind its inner units: see [Note: what lies behind the inner units].
  bool is_behind = false;
  bool reshards_when_unheld = true;  // false: reshard_if_unheld() does nothing
  /// Gradients are divided by it; none: by the number of ranks.
  std::optional<double> gradient_divide_factor{};
  /// Sees each reduced flat gradient shard, in the masters' dtype, before it is published or added.
  std::function<void(const at::Tensor&)> all_reduce_hook{};
  buffer::ByteCounters counters;

 private:
  struct Reduction {
    comm::Work work;
    buffer::Slot staging;
    buffer::DBuffer* target = nullptr;
    bool all_reducing = false;
    bool scattered = false;
    bool packed = false;  // out of the reduce buffer, which may hold other gradients by now
  };

  bool has_fresh_part(std::int64_t version) const;
  comm::Work gather_from_small_group();
  void gather_by_front();
  void check_has_values() const;
  Reduction begin_reduction(buffer::DBuffer::ReduceOptions& options);
  void release_addends();
  std::array<Index, 3> holders(int param) const;
  bool is_held() const;
  bool is_held(int param, Index own_holders) const;
  bool narrows_now() const;
  void open_slot(int param, Index own_holders);
  void move_slots(buffer::DBuffer& target);
  buffer::DBufferSpec buffer_spec(at::ScalarType dtype, int num_segments) const;
  void make_reduce_buffers(int num_segments);
  buffer::DBuffer& reduction_target(buffer::DBuffer::ReduceOptions& options);
  c10::Device home() const;
  at::Tensor new_gradients(const buffer::DBuffer& shard);
  void merge(buffer::DBuffer& target);
  void take_foreign_gradients();
  double divide_factor() const;
  buffer::ShardedTensor describe(int param, int unit) const;

  ParamGroupSpec spec_;
  std::unique_ptr<GroupFront> front_;
  GroupSlots slots_;
  ShardState state_ = ShardState::kSharded;
  bool may_be_gone_ = false;                       // reshard_if_unheld() was called for this image
  std::vector<std::array<Index, 3>> own_holders_;  // by parameter: holders() when nobody else held it
  int reduced_segments_ = 0;
  std::unique_ptr<buffer::DBuffer> masters_;
  std::unique_ptr<buffer::DBuffer> image_;
  std::unique_ptr<buffer::DBuffer> reduce_;
  std::unique_ptr<buffer::DBuffer> narrow_;  // the same in the image's dtype; null: see narrows_gradients()
  buffer::DBuffer* filling_ = nullptr;       // which of the two gradients are in; null: neither has bytes
  bool is_over_weights_ = false;             // its bytes are the image's
  bool accumulates_ = false;                 // with gradients of an earlier backward
  std::unique_ptr<buffer::DBuffer> grads_;
  std::unique_ptr<buffer::DBuffer> partial_;  // HSDP: summed over the shard group only
  std::unique_ptr<buffer::DBuffer> scratch_;  // a sum that is to be added to gradients that are there
  comm::Communicator small_group_{};
  buffer::Slot kept_;  // this rank's part of the image among the small group
  comm::Work gather_;
  std::int64_t gathered_version_ = 0;
  std::optional<Reduction> reduction_;
  bool result_is_ready_ = false;
  bool unpublished_ = false;  // grads_ holds sums that .grad doesn't show yet
  void* unit_ = nullptr;
  std::vector<SlotState> slot_states_;  // of this rank's gradients
  std::vector<char> used_;
  std::vector<char> has_grad_;  // .grad is not None
  std::vector<comm::compat::NodePtr> accumulators_;
  GradientReady gradient_ready_;
  std::string needs_values_;
  std::uint64_t checksum_ = 0;
};

}  // namespace ragged::fsdp
