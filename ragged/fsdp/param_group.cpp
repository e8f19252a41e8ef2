#include "ragged/fsdp/param_group.h"

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include "ragged/base/error.h"
#include "ragged/comm/below_autograd.h"

namespace ragged::fsdp {
namespace {

using buffer::DBuffer;
using buffer::Form;
using comm::BelowAutograd;

// Order matters and so does each bit: a multiply-and-xor over the words of the storage.
std::uint64_t checksum_of(const at::Tensor& tensor, std::uint64_t hash) {
  const at::Tensor host = tensor.detach().cpu().contiguous();
  const auto* bytes = static_cast<const unsigned char*>(host.const_data_ptr());
  std::size_t left = host.nbytes();
  while (left > 0) {
    std::uint64_t word = 0;
    const std::size_t step = std::min<std::size_t>(left, sizeof(word));
    std::memcpy(&word, bytes, step);
    hash = (hash ^ word) * 0x9E3779B97F4A7C15ULL;
    hash ^= hash >> 29;
    bytes += step;
    left -= step;
  }
  return hash;
}

}  // namespace

ParamGroup::ParamGroup(ParamGroupSpec spec, std::span<const at::Tensor> values) : spec_(std::move(spec)) {
  const auto num_params = plan().params.size();
  filled_.assign(num_params, 0);
  used_.assign(num_params, 0);
  has_grad_.assign(num_params, 0);
  masters_ = std::make_unique<DBuffer>(buffer_spec(spec_.master_dtype, -1), Form::kSharded);
  image_ = std::make_unique<DBuffer>(buffer_spec(spec_.param_dtype, -1), Form::kReplicated);
  make_reduce_buffers(plan().num_trainable_segments());

  if (spec_.front_holds_values) return;
  const at::NoGradGuard no_grad;
  at::Tensor memory = at::empty(
      {masters_->numel()},
      at::TensorOptions().dtype(spec_.master_dtype).device(home()).pinned_memory(spec_.offload.pin_memory));
  masters_->adopt(memory.zero_());  // padding stays zero: it travels, and norms run over it
  for (std::size_t i = 0; i < num_params; ++i) {
    const at::Tensor& value = values[i];
    if (!value.defined() || buffer::lacks_bytes(value)) {
      if (needs_values_.empty()) needs_values_ = plan().params[i].name;
      continue;
    }
    const int index = static_cast<int>(i);
    const layout::Interval owned = plan().owned(index, spec_.groups.shard.rank());
    masters_->tensor(index).copy_(value.detach().view({-1}).narrow(0, owned.begin, owned.size()));
    checksum_ = checksum_of(value, checksum_);
  }
}

std::shared_ptr<ParamGroup> ParamGroup::converted(
    at::ScalarType master, at::ScalarType param, at::ScalarType reduce) const {
  ParamGroupSpec spec = spec_;
  spec.master_dtype = master;
  spec.param_dtype = param;
  spec.reduce_dtype = reduce;
  spec.params.clear();
  auto group = std::make_shared<ParamGroup>(std::move(spec), std::vector<at::Tensor>(plan().params.size()));
  group->small_group_ = small_group_;
  return group;
}

void ParamGroup::bind(std::vector<at::Tensor> params) {
  RAGGED_ASSERT(
      params.size() == plan().params.size(), "{} leaves for a bucket of {}", params.size(), plan().params.size());
  spec_.params = std::move(params);
  accumulators_.clear();
}

void ParamGroup::set_master(int param, const at::Tensor& local) {
  const at::NoGradGuard no_grad;
  masters_->tensor(param).copy_(local);
}

// Where masters and published gradients live.
c10::Device ParamGroup::home() const {
  return spec_.offload.enabled ? c10::Device(c10::kCPU) : spec_.groups.device;
}

buffer::DBufferSpec ParamGroup::buffer_spec(at::ScalarType dtype, int num_segments) const {
  return {
      .unit = spec_.name,
      .mesh = spec_.groups.mesh,
      .plan = spec_.plan,
      .num_segments = num_segments,
      .rank = spec_.groups.shard.rank(),
      .dtype = dtype,
      .device = spec_.groups.device};
}

void ParamGroup::make_reduce_buffers(int num_segments) {
  reduced_segments_ = num_segments;
  reduce_ = std::make_unique<DBuffer>(buffer_spec(spec_.reduce_dtype, num_segments), Form::kPartial);
  grads_ = std::make_unique<DBuffer>(buffer_spec(spec_.master_dtype, num_segments), Form::kSharded);
  partial_ = std::make_unique<DBuffer>(buffer_spec(spec_.master_dtype, num_segments), Form::kSharded);
  scratch_ = std::make_unique<DBuffer>(buffer_spec(spec_.master_dtype, num_segments), Form::kSharded);
}

void ParamGroup::rename(std::string unit, const std::vector<std::string>& params) {
  auto plan = std::make_shared<plan::BucketPlan>(*spec_.plan);
  for (std::size_t i = 0; i < params.size(); ++i) {
    plan->params[i].name = params[i];
    if (!needs_values_.empty() && spec_.plan->params[i].name == needs_values_) needs_values_ = params[i];
  }
  spec_.plan = plan;
  spec_.name = std::move(unit);
  for (DBuffer* buffer : {masters_.get(), image_.get(), reduce_.get(), grads_.get(), partial_.get(), scratch_.get()}) {
    buffer->rename(spec_.name, spec_.plan);
  }
}

Index ParamGroup::staging_bytes() const {
  const Index numel = reduce_->staging_numel(spec_.groups.shard, *grads_, {.accumulate = true});
  return numel * static_cast<Index>(c10::elementSize(spec_.reduce_dtype));
}

void ParamGroup::unshard() {
  if (front_ && front_->gathers()) return gather_by_front();
  const auto version = masters_->flat()._version();
  if (state_ == ShardState::kUnsharding) return;
  if (state_ == ShardState::kUnsharded && gathered_version_ == version) return;
  RAGGED_CHECK(
      needs_values_.empty(),
      "[unshard] Expected parameter '{}' to have values, but it was built without bytes and never initialised. Call "
      "init_parameters() on the root first.",
      needs_values_);
  comm::ProfilerRange range("ragged::unshard", spec_.name);
  const c10::OptionalStreamGuard on_gather_stream(slots_.gather_stream);
  if (!image_->is_resident()) image_->attach(slots_.pool->take(slots_.image, image_->nbytes()));
  if (has_fresh_part(version)) {
    gather_ = gather_from_small_group();
  } else {
    kept_ = {};
    image_->cast_from(*masters_, counters);
    gather_ = image_->all_gather(spec_.groups.shard);
  }
  gathered_version_ = version;
  state_ = ShardState::kUnsharding;
}

void ParamGroup::wait_for_unshard() {
  if (state_ != ShardState::kUnsharding) return;
  if (front_ && front_->gathers()) {
    std::vector<at::Tensor> leaves = front_->finish_gather();
    if (!leaves.empty()) {
      bind(std::move(leaves));
      hook_gradients(gradient_ready_);
    }
  }
  gather_.wait();
  kept_ = {};
  state_ = ShardState::kUnsharded;
  if (front_) front_->unsharded();
}

void ParamGroup::reshard() {
  kept_ = {};
  if (state_ == ShardState::kSharded) return;
  wait_for_unshard();
  if (front_ && front_->gathers()) front_->drop();
  image_->detach();  // and the slot goes back to the pool
  state_ = ShardState::kSharded;
  if (front_) front_->sharded();
}

void ParamGroup::gather_by_front() {
  if (state_ != ShardState::kSharded) return;
  comm::ProfilerRange range("ragged::unshard", spec_.name);
  front_->gather();
  state_ = ShardState::kUnsharding;
}

// ---- keeping the image among a small group ----

Index ParamGroup::kept_bytes() const {
  const int ranks = small_group_.size();
  if (ranks == 1) return 0;
  const auto is_even = [](const plan::Segment& s) { return s.kind == plan::SegmentKind::kUniform; };
  const auto& segments = plan().segments;
  return std::all_of(segments.begin(), segments.end(), is_even) ? image_bytes() / ranks : 0;
}

bool ParamGroup::has_fresh_part(std::int64_t version) const {
  return static_cast<bool>(kept_) && gathered_version_ == version;
}

void ParamGroup::reshard_to_small_group() {
  if (state_ == ShardState::kSharded || slots_.kept < 0 || kept_bytes() == 0 || (front_ && front_->gathers())) {
    return reshard();
  }
  wait_for_unshard();
  BelowAutograd guard;
  buffer::Slot kept = slots_.pool->take(slots_.kept, kept_bytes());
  const at::Tensor part = at::from_blob(
      kept.data(), {image_->numel() / small_group_.size()},
      at::TensorOptions().dtype(spec_.param_dtype).device(spec_.groups.device));
  Index offset = 0;
  for (const plan::Segment& segment : plan().segments) {
    const Index length = segment.numel / small_group_.size();
    part.narrow(0, offset, length)
        .copy_(image_->flat().narrow(0, segment.image_offset + small_group_.rank() * length, length));
    offset += length;
  }
  counters.copied += kept_bytes();
  reshard();
  kept_ = std::move(kept);
}

comm::Work ParamGroup::gather_from_small_group() {
  BelowAutograd guard;
  const int ranks = small_group_.size();
  const at::Tensor part = at::from_blob(
      kept_.data(), {image_->numel() / ranks},
      at::TensorOptions().dtype(spec_.param_dtype).device(spec_.groups.device));
  std::vector<plan::Segment> segments = plan().segments;
  Index offset = 0;
  for (plan::Segment& segment : segments) {
    const Index length = segment.numel / ranks;
    image_->flat()
        .narrow(0, segment.image_offset + small_group_.rank() * length, length)
        .copy_(part.narrow(0, offset, length));
    offset += length;
    segment.owners.clear();
    for (int rank = 0; rank < ranks; ++rank) {
      const Index begin = segment.image_offset + rank * length;
      segment.owners.push_back({begin, begin + length});
    }
  }
  counters.copied += kept_bytes();
  return small_group_.all_gather(segments, image_->flat(), spec_.name);
}

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
          if (const auto group = weak.lock()) group->gradient_ready_(index);
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
        !grads_->is_resident() && !reduce_->is_resident(),
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
  if (!leaf_grad.defined()) return;
  const at::Tensor grad = front_ ? front_->dense_gradient(param, leaf_grad) : leaf_grad;
  RAGGED_CHECK(
      grad.layout() == at::kStrided,
      "[backward] Expected a dense gradient, but got a sparse one (param '{}'). Turn sparse gradients off.",
      plan().params[p].name);
  BelowAutograd guard;
  if (!reduce_->is_resident()) reduce_->attach(slots_.pool->take(slots_.reduce, reduce_->nbytes()));
  const at::Tensor slot = reduce_->tensor(param);
  if (filled_[p]) {
    slot.add_(grad);
    counters.added += static_cast<Index>(slot.nbytes());
  } else {
    slot.copy_(grad);
    counters.cast_grad += static_cast<Index>(slot.nbytes());
  }
  filled_[p] = true;
  leaf_grad.reset();
}

at::Tensor ParamGroup::gradient_memory(const DBuffer& shard) {
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
  if (!target->is_resident()) target->adopt(gradient_memory(*target));
  return *target;
}

double ParamGroup::divide_factor() const {
  return gradient_divide_factor.value_or(spec_.groups.shard.size() * spec_.groups.replicate.size());
}

void ParamGroup::issue_reduction() {
  result_is_ready_ = false;
  if (front_ && !unpublished_) take_foreign_gradients();
  unpublished_ = true;
  RAGGED_ASSERT(!reduction_, "two reductions of unit '{}' at once", spec_.name);
  comm::ProfilerRange range("ragged::reduce", spec_.name);
  if (!reduce_->is_resident()) reduce_->attach(slots_.pool->take(slots_.reduce, reduce_->nbytes()));
  reduce_->zero_unfilled(filled_, counters);
  for (std::size_t i = 0; i < filled_.size(); ++i) used_[i] = static_cast<char>(used_[i] | filled_[i]);
  DBuffer::ReduceOptions options;
  Reduction reduction;
  reduction.target = &reduction_target(options);
  const Index staging_numel = reduce_->staging_numel(spec_.groups.shard, *reduction.target, options);
  at::Tensor staging;
  if (staging_numel > 0) {
    const Index bytes = staging_numel * static_cast<Index>(c10::elementSize(spec_.reduce_dtype));
    reduction.staging = slots_.pool->take(slots_.staging, bytes);
    staging = at::from_blob(
        reduction.staging.data(), {staging_numel},
        at::TensorOptions().dtype(spec_.reduce_dtype).device(spec_.groups.device));
  }
  reduction.work = reduce_->reduce_scatter(spec_.groups.shard, *reduction.target, staging, options);
  reduction_ = std::move(reduction);
}

void ParamGroup::finish_scatter() {
  if (!reduction_ || reduction_->scattered) return;
  reduction_->work.wait();
  reduction_->scattered = true;
  reduction_->staging = {};
  reduce_->detach();
  std::fill(filled_.begin(), filled_.end(), 0);
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
              : gradient_memory(*grads_));
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

void ParamGroup::abandon() {
  gather_.abandon();
  if (reduction_) {
    reduction_->work.abandon();
    // Sums that never came: of this step alone, unless earlier micro-batches were published.
    const bool published = std::find(has_grad_.begin(), has_grad_.end(), 1) != has_grad_.end();
    if (reduction_->target != grads_.get() || !published) reduction_->target->adopt({});
    reduction_.reset();
  }
  reduce_->detach();
  kept_ = {};
  if (state_ != ShardState::kSharded) {
    if (front_ && front_->gathers()) front_->drop();
    image_->detach();
    state_ = ShardState::kSharded;
    if (front_) front_->sharded();
  }
  std::fill(filled_.begin(), filled_.end(), 0);
  std::fill(used_.begin(), used_.end(), 0);
  unpublished_ = false;
  for (at::Tensor& param : spec_.params) param.mutable_grad().reset();
}

buffer::ShardedTensor ParamGroup::describe(int param, int unit) const {
  const plan::ParamSpec& spec = plan().params[static_cast<std::size_t>(param)];
  buffer::ShardedTensor tensor;
  tensor.name = spec.name;
  tensor.shape = spec.shape;
  tensor.dtype = spec_.master_dtype;
  tensor.mesh = spec_.groups.mesh;
  for (const layout::MeshDim& dim : spec_.groups.mesh.dims()) {
    if (dim.role == layout::DimRole::kShard) {
      tensor.placements.emplace_back(plan().placement(param));
    } else {
      tensor.placements.emplace_back(layout::Replicate{});
    }
  }
  tensor.owned = plan().owned(param, spec_.groups.shard.rank());
  tensor.unit = unit;
  tensor.index = param;
  tensor.requires_grad = spec_.params[static_cast<std::size_t>(param)].requires_grad();
  return tensor;
}

buffer::ShardedTensor ParamGroup::sharded_parameter(int param, int unit) const {
  buffer::ShardedTensor tensor = describe(param, unit);
  tensor.local = masters_->tensor(param);
  return tensor;
}

buffer::ShardedTensor ParamGroup::sharded_gradient(int param, int unit) const {
  buffer::ShardedTensor tensor = describe(param, unit);
  tensor.local = grads_->tensor(param);
  return tensor;
}

void ParamGroup::bump_master_version() {
  if (spec_.front_holds_values) return;
  masters_->flat().unsafeGetTensorImpl()->bump_version();
}

}  // namespace ragged::fsdp
