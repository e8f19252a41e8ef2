// The gradients' half of a ParamGroup: from autograd's hands into the reduce buffer, through the reduction, to .grad.
#include <algorithm>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include "ragged/base/error.h"
#include "ragged/comm/below_autograd.h"
#include "ragged/fsdp/param_group.h"

namespace ragged::fsdp {

using buffer::DBuffer;
using comm::BelowAutograd;

void ParamGroup::hook_gradients(const GradientReady& ready) {
  gradient_ready_ = ready;
  accumulators_.resize(spec_.params.size());
  for (std::size_t i = 0; i < spec_.params.size(); ++i) {
    if (accumulators_[i] || !spec_.params[i].requires_grad()) continue;
    // The node is kept: a tensor holds its accumulator weakly, and the hook would go with it.
    accumulators_[i] = torch::autograd::impl::grad_accumulator(spec_.params[i]);
    accumulators_[i]->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [weak = weak_from_this(), index = static_cast<int>(i)](
            const torch::autograd::variable_list& outputs, const torch::autograd::variable_list&) {
          if (const auto group = weak.lock()) group->gradient_ready_(index, GradientEvent::kComplete);
          return outputs;
        }));
  }
}

bool ParamGroup::refresh_trainable(const GradientReady& ready) {
  if (front_) front_->follow_requires_grad();
  bool trains = false;
  bool unfrozen = false;
  for (std::size_t i = 0; i < spec_.params.size(); ++i) {
    if (!spec_.params[i].requires_grad()) continue;
    trains = true;
    unfrozen = unfrozen || i >= accumulators_.size() || !accumulators_[i];
    if (plan().segment_of(static_cast<int>(i)) < reduced_segments_) continue;
    RAGGED_CHECK(
        !grads_->is_resident() && !filling_,
        "[unfreeze] Expected no gradients in unit '{}' when '{}' is unfrozen, but got some. Call zero_grad() first.",
        spec_.name, plan().params[i].name);
    make_reduce_buffers(static_cast<int>(plan().segments.size()));
    slots_.reduce = slots_.pool->add_class(buffer::SlotUse::kReduce, reduce_->nbytes());
    slots_.staging = slots_.pool->add_class(buffer::SlotUse::kStaging, staging_bytes());
    slots_.gradient = slots_.pool->add_class(buffer::SlotUse::kGradient, grads_->nbytes());
  }
  if (unfrozen) hook_gradients(ready);
  return trains;
}

void ParamGroup::take_gradient(int param) {
  const auto p = static_cast<std::size_t>(param);
  at::Tensor& leaf_grad = spec_.params[p].mutable_grad();
  if (slot_states_[p] == SlotState::kWritten) slot_states_[p] = SlotState::kFilled;
  if (!leaf_grad.defined()) return;
  const at::Tensor grad = front_ ? front_->dense_gradient(param, leaf_grad) : leaf_grad;
  RAGGED_CHECK(
      grad.layout() == at::kStrided,
      "[backward] Expected a dense gradient, but got a sparse one (param '{}'). Turn sparse gradients off.",
      plan().params[p].name);
  BelowAutograd guard;
  open_slot(param, 0);
  const at::Tensor slot = filling_->tensor(param);
  if (slot_states_[p] == SlotState::kFilled) {
    slot.add_(grad);
    counters.added += static_cast<Index>(slot.nbytes());
  } else {
    slot.copy_(grad);
    counters.cast_grad += static_cast<Index>(slot.nbytes());
  }
  slot_states_[p] = SlotState::kFilled;
  leaf_grad.reset();
}

bool ParamGroup::takes_in_place(int param, const at::Tensor& tensor) const {
  if (gradients_in_place == GradientsInPlace::kNo || !gradient_ready_) return false;
  const bool same_dtype = spec_.param_dtype == spec_.reduce_dtype || narrow_;
  if (gradients_in_place == GradientsInPlace::kSameBits && !same_dtype) return false;
  const auto p = static_cast<std::size_t>(param);
  return plan().segment_of(param) < reduced_segments_ && p < spec_.params.size() && spec_.params[p].is_same(tensor);
}

bool ParamGroup::narrows_gradients() const {
  return narrow_ && gradients_in_place != GradientsInPlace::kAlways;
}

// Alike on all ranks, whichever of them had gradients.
bool ParamGroup::narrows_now() const {
  return narrows_gradients() && requires_gradient_sync && !accumulates_;
}

// Bytes for the slots, this parameter's not needed for anything else.
void ParamGroup::open_slot(int param, Index own_holders) {
  if (!filling_) {
    filling_ = narrows_now() ? narrow_.get() : reduce_.get();
    const auto dtype = filling_ == reduce_.get() ? spec_.reduce_dtype : spec_.param_dtype;
    is_over_weights_ = gradient_memory == GradientMemory::kOverWeights && may_overwrite && dtype == spec_.param_dtype &&
        requires_gradient_sync && reshard_after_backward && state_ == ShardState::kUnsharded && image_->is_resident();
    if (is_over_weights_) {
      filling_->attach_over(*image_);
    } else {
      filling_->attach(slots_.pool->take(slots_.reduce, filling_->nbytes()));
    }
  }
  const bool is_first = slot_states_[static_cast<std::size_t>(param)] == SlotState::kEmpty;
  if (is_over_weights_ && (!may_overwrite || (is_first && is_held(param, own_holders)))) {
    move_slots(*filling_);
  }
}

ParamGroup::GradientSlot ParamGroup::gradient_slot(int param, Index own_holders) {
  gradient_ready_(param, GradientEvent::kInPlace);
  open_slot(param, own_holders);
  return {.tensor = filling_->tensor(param), .state = slot_states_[static_cast<std::size_t>(param)]};
}

void ParamGroup::wrote_slot(int param, Index buffer::ByteCounters::*how) {
  SlotState& state = slot_states_[static_cast<std::size_t>(param)];
  if (state == SlotState::kEmpty) state = SlotState::kWritten;
  counters.*how += static_cast<Index>(filling_->tensor(param).nbytes());
}

at::Tensor ParamGroup::new_gradients(const DBuffer& shard) {
  // The slot goes back to the pool with the last view of the tensor.
  auto slot = std::make_shared<buffer::Slot>(slots_.pool->take(slots_.gradient, shard.nbytes()));
  void* data = slot->data();
  return at::from_blob(
      data, {shard.numel()}, [slot](void*) mutable { slot.reset(); },
      at::TensorOptions().dtype(spec_.master_dtype).device(spec_.groups.device));
}

// Where the scatter writes. One replica: into the gradients themselves, added where a micro-batch came before.
// Several: into a shard that is still to be summed over the replicas.
// Somebody who wants to see the sum (a hook) sees this step's alone.
DBuffer& ParamGroup::reduction_target(DBuffer::ReduceOptions& options) {
  const bool replicated = spec_.groups.replicate.size() > 1;
  const bool postponed = replicated && (!requires_all_reduce || partial_->is_resident());
  DBuffer* target = grads_.get();
  if (postponed) {
    target = partial_.get();
  } else if (spec_.offload.enabled || (grads_->is_resident() && (replicated || all_reduce_hook))) {
    target = scratch_.get();
  }
  if (!replicated) options.scale = 1.0 / divide_factor();
  options.accumulate = target->is_resident();
  if (!target->is_resident()) target->adopt(new_gradients(*target));
  return *target;
}

double ParamGroup::divide_factor() const {
  return gradient_divide_factor.value_or(spec_.groups.shard.size() * spec_.groups.replicate.size());
}

// What comes before the collective: the reduce buffer is whole, and it is decided where the sum goes.
ParamGroup::Reduction ParamGroup::begin_reduction(DBuffer::ReduceOptions& options) {
  result_is_ready_ = false;
  if (front_ && !unpublished_) take_foreign_gradients();
  unpublished_ = true;
  RAGGED_ASSERT(!reduction_, "two reductions of unit '{}' at once", spec_.name);
  DBuffer& addends = narrows_now() ? *narrow_ : *reduce_;
  if (filling_ != &addends) move_slots(addends);
  RAGGED_ASSERT(!is_over_weights_, "unit '{}' is reduced from the image that it keeps", spec_.name);
  std::vector<char> filled(slot_states_.size());
  for (std::size_t i = 0; i < filled.size(); ++i) filled[i] = slot_states_[i] != SlotState::kEmpty;
  addends.zero_unfilled(filled, counters);
  for (std::size_t i = 0; i < filled.size(); ++i) used_[i] = static_cast<char>(used_[i] | filled[i]);
  Reduction reduction;
  reduction.target = &reduction_target(options);
  return reduction;
}

void ParamGroup::issue_reduction() {
  comm::ProfilerRange range("ragged::reduce", spec_.name);
  DBuffer::ReduceOptions options;
  Reduction reduction = begin_reduction(options);
  const DBuffer& addends = *filling_;
  const Index staging_numel = addends.staging_numel(spec_.groups.shard, *reduction.target, options);
  at::Tensor staging;
  if (staging_numel > 0) {
    const auto dtype = addends.flat().scalar_type();
    const Index bytes = staging_numel * static_cast<Index>(c10::elementSize(dtype));
    reduction.staging = slots_.pool->take(slots_.staging, bytes);
    staging = at::from_blob(
        reduction.staging.data(), {staging_numel}, at::TensorOptions().dtype(dtype).device(spec_.groups.device));
  }
  reduction.work = addends.reduce_scatter(spec_.groups.shard, *reduction.target, staging, options);
  reduction_ = std::move(reduction);
}

// Gradients go on in a buffer with a slot of its own: from over weights that are still needed (the target is the one
// that lay there), or from the other dtype's, where settings changed since they came; or nothing came.
void ParamGroup::move_slots(DBuffer& target) {
  BelowAutograd guard;
  if (filling_ == &target) target.detach();
  target.attach(slots_.pool->take(slots_.reduce, target.nbytes()));
  for (std::size_t i = 0; filling_ && i < slot_states_.size(); ++i) {
    const int param = static_cast<int>(i);
    if (slot_states_[i] == SlotState::kEmpty) continue;
    const at::Tensor slot = target.tensor(param);
    slot.copy_(is_over_weights_ ? image_->tensor(param) : filling_->tensor(param));
    counters.copied += static_cast<Index>(slot.nbytes());
  }
  if (filling_ && filling_ != &target) filling_->detach();
  is_over_weights_ = false;
  filling_ = &target;
}

void ParamGroup::release_addends() {
  filling_->detach();
  filling_ = nullptr;
  accumulates_ = false;
  std::fill(slot_states_.begin(), slot_states_.end(), SlotState::kEmpty);
}

void ParamGroup::finish_scatter() {
  if (!reduction_ || reduction_->scattered) return;
  reduction_->work.wait();
  reduction_->scattered = true;
  reduction_->staging = {};
  if (!reduction_->packed) release_addends();
  if (spec_.groups.replicate.size() == 1 || !requires_all_reduce) return;
  reduction_->work = reduction_->target->all_reduce(spec_.groups.replicate);
  reduction_->all_reducing = true;
}

void ParamGroup::finish_reduction() {
  if (!reduction_) return;
  finish_scatter();
  reduction_->work.wait();
  const Reduction done = std::move(*reduction_);
  reduction_.reset();
  result_is_ready_ = spec_.groups.replicate.size() == 1 || done.all_reducing;
  if (!result_is_ready_) return;
  if (done.all_reducing) done.target->scale(1.0 / divide_factor());
  if (all_reduce_hook) {
    const at::Tensor sum = done.target->flat();
    all_reduce_hook(sum);
  }
  if (done.target != grads_.get()) merge(*done.target);
}

void ParamGroup::merge(DBuffer& target) {
  const at::Tensor sum = target.flat().to(home());
  if (spec_.offload.enabled) counters.copied += static_cast<Index>(sum.nbytes());
  target.adopt({});
  if (!grads_->is_resident()) {
    grads_->adopt(sum);
    return;
  }
  target.adopt(sum);
  grads_->add(target, counters);
  target.adopt({});
}

std::vector<char> ParamGroup::used() const {
  std::vector<char> used = used_;
  for (std::size_t i = 0; i < used.size(); ++i) used[i] = used[i] || slot_states_[i] != SlotState::kEmpty;
  return used;
}

bool ParamGroup::has_unreduced() const {
  return std::any_of(slot_states_.begin(), slot_states_.end(), [](SlotState s) { return s != SlotState::kEmpty; });
}

void ParamGroup::publish(const char* used_by_any) {
  for (std::size_t i = 0; i < used_.size(); ++i) {
    if (used_by_any[i]) has_grad_[i] = true;
  }
  std::fill(used_.begin(), used_.end(), 0);
  unpublished_ = false;
  if (!front_) return;
  std::vector<GroupFront::Published> gradients;
  for (std::size_t i = 0; i < has_grad_.size(); ++i) {
    const int index = static_cast<int>(i);
    if (!has_grad_[i] || plan().segment_of(index) >= reduced_segments_) continue;
    gradients.push_back({.param = index, .local = grads_->tensor(index), .is_fresh = used_by_any[i] != 0});
  }
  front_->published(gradients);
}

void ParamGroup::follow_gradients() {
  if (!front_ || unpublished_) return;
  bool any = false;
  for (std::size_t i = 0; i < has_grad_.size(); ++i) {
    has_grad_[i] = front_->gradient(static_cast<int>(i)) != GroupFront::Gradient::kNone;
    any = any || has_grad_[i];
  }
  if (any || !grads_->is_resident()) return;
  front_->release_gradients();
  grads_->adopt({});
}

// .grad of the front's parameters is theirs to set. None means that this reduction overwrites, whatever memory says;
// a tensor of somebody else's is what this reduction adds to.
void ParamGroup::take_foreign_gradients() {
  follow_gradients();
  const bool fresh = !grads_->is_resident();
  BelowAutograd guard;
  for (std::size_t i = 0; i < has_grad_.size(); ++i) {
    const int index = static_cast<int>(i);
    if (plan().segment_of(index) >= reduced_segments_) continue;
    const bool foreign = has_grad_[i] && front_->gradient(index) == GroupFront::Gradient::kForeign;
    if (!foreign && (has_grad_[i] || fresh)) continue;
    if (!grads_->is_resident()) {
      grads_->adopt(
          spec_.offload.enabled
              ? at::empty({grads_->numel()}, at::TensorOptions().dtype(spec_.master_dtype).device(home()))
              : new_gradients(*grads_));
      grads_->zero(counters);
    }
    at::Tensor own = grads_->tensor(index);
    if (own.numel() == 0) continue;
    if (foreign) {
      own.copy_(front_->foreign_gradient(index));
    } else {
      own.zero_();
      counters.zeroed += static_cast<Index>(own.nbytes());
    }
  }
}

void ParamGroup::zero_grad() {
  std::fill(has_grad_.begin(), has_grad_.end(), 0);
  grads_->adopt({});
}

}  // namespace ragged::fsdp
