#include "ragged/fsdp/param_group.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

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
  slot_states_.assign(num_params, SlotState::kEmpty);
  used_.assign(num_params, 0);
  has_grad_.assign(num_params, 0);
  masters_ = std::make_unique<DBuffer>(buffer_spec(spec_.master_dtype, -1), Form::kSharded);
  image_ = std::make_unique<DBuffer>(buffer_spec(spec_.param_dtype, -1), Form::kReplicated);
  image_->set_owner(this);
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
  group->gradients_in_place = gradients_in_place;
  group->gradient_memory = gradient_memory;
  group->is_behind = is_behind;
  return group;
}

void ParamGroup::bind(std::vector<at::Tensor> params) {
  RAGGED_ASSERT(
      params.size() == plan().params.size(), "{} leaves for a bucket of {}", params.size(), plan().params.size());
  spec_.params = std::move(params);
  accumulators_.clear();
  own_holders_.clear();
}

ParamGroup* ParamGroup::of(const at::Tensor& tensor) {
  return static_cast<ParamGroup*>(buffer::DroppableStorage::owner_of(tensor));
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
  narrow_.reset();
  const bool is_narrower = c10::elementSize(spec_.param_dtype) < c10::elementSize(spec_.reduce_dtype);
  if (is_narrower && spec_.groups.shard.sums_after_transfer(reduce_->segments())) {
    narrow_ = std::make_unique<DBuffer>(buffer_spec(spec_.param_dtype, num_segments), Form::kPartial);
  }
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
  if (narrow_) narrow_->rename(spec_.name, spec_.plan);
}

Index ParamGroup::staging_bytes() const {
  const Index numel = reduce_->staging_numel(spec_.groups.shard, *grads_, {.accumulate = true});
  return numel * static_cast<Index>(c10::elementSize(spec_.reduce_dtype));
}

void ParamGroup::check_has_values() const {
  RAGGED_CHECK(
      needs_values_.empty(),
      "[unshard] Expected parameter '{}' to have values, but it was built without bytes and never initialised. Call "
      "init_parameters() on the root first.",
      needs_values_);
}

void ParamGroup::unshard() {
  may_be_gone_ = false;
  if (front_ && front_->gathers()) return gather_by_front();
  if (is_over_weights_) {  // the image isn't what it was
    move_slots(*filling_);
    state_ = ShardState::kSharded;
  }
  const auto version = masters_->flat()._version();
  if (state_ == ShardState::kUnsharding) return;
  if (state_ == ShardState::kUnsharded && gathered_version_ == version) return;
  check_has_values();
  comm::ProfilerRange range("ragged::unshard", spec_.name);
  const c10::OptionalStreamGuard on_gather_stream(slots_.gather_stream);
  if (!image_->is_resident()) image_->attach(slots_.pool->take(slots_.image, image_->nbytes()));
  if (has_fresh_part(version)) {
    gather_ = gather_from_small_group();
  } else {
    kept_ = {};
    if (gathers_from_masters()) {
      gather_ = image_->all_gather_from(*masters_, spec_.groups.shard);
    } else {
      image_->cast_from(*masters_, counters);
      gather_ = image_->all_gather(spec_.groups.shard);
    }
  }
  gathered_version_ = version;
  state_ = ShardState::kUnsharding;
}

bool ParamGroup::gathers_from_masters() const {
  return spec_.param_dtype == spec_.master_dtype && home() == spec_.groups.device &&
      spec_.groups.shard.takes_own_part(plan().segments);
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
  constexpr Index kAny = std::numeric_limits<Index>::max();
  own_holders_.resize(spec_.params.size(), {kAny, kAny, kAny});
  for (std::size_t i = 0; i < own_holders_.size(); ++i) {
    const auto now = holders(static_cast<int>(i));
    for (std::size_t k = 0; k < now.size(); ++k) own_holders_[i][k] = std::min(own_holders_[i][k], now[k]);
  }
}

void ParamGroup::reshard() {
  may_be_gone_ = false;
  kept_ = {};
  if (state_ == ShardState::kSharded) return;
  wait_for_unshard();
  if (front_ && front_->gathers()) front_->drop();
  buffer::Slot slot = image_->detach();  // goes back to the pool
  if (is_over_weights_) {                // or goes on as the reduce buffer
    filling_->attach(std::move(slot));
    is_over_weights_ = false;
  }
  state_ = ShardState::kSharded;
  if (front_) front_->sharded();
}

// References to the parameter, to the tensor over its part of the image (another one under tensor parallelism), and to
// the storage below both, which views share; and the front's. Autograd's saved tensors are among them, so when the
// counts are those of a parameter that was just gathered, no graph needs it.
std::array<Index, 3> ParamGroup::holders(int param) const {
  const at::Tensor& leaf = spec_.params[static_cast<std::size_t>(param)];
  const at::Tensor over_image = image_->tensor(param);
  return {
      static_cast<Index>(leaf.use_count()) + (front_ ? front_->num_holders(param) : 0),
      static_cast<Index>(over_image.use_count()), static_cast<Index>(over_image.storage().use_count())};
}

bool ParamGroup::is_held() const {
  for (std::size_t i = 0; i < own_holders_.size(); ++i) {
    if (is_held(static_cast<int>(i), 0)) return true;
  }
  return false;
}

bool ParamGroup::is_held(int param, Index own_holders) const {
  const auto now = holders(param);
  const auto& before = own_holders_[static_cast<std::size_t>(param)];
  return now[0] > before[0] + own_holders || now[1] > before[1] || now[2] > before[2];
}

void ParamGroup::reshard_if_unheld() {
  const bool may = state_ == ShardState::kUnsharded && reshard_after_backward && reshards_when_unheld &&
      !(front_ && front_->gathers());
  if (!may) return;
  if (!is_held()) reshard();
  may_be_gone_ = true;
}

void ParamGroup::unshard_again() {
  if (!may_be_gone_) return;
  if (state_ == ShardState::kUnsharded) state_ = ShardState::kSharded;  // the same values over those that are there
  unshard();
  wait_for_unshard();
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
  if (narrow_) narrow_->detach();
  filling_ = nullptr;
  is_over_weights_ = accumulates_ = false;
  kept_ = {};
  if (state_ != ShardState::kSharded) {
    if (front_ && front_->gathers()) front_->drop();
    image_->detach();
    state_ = ShardState::kSharded;
    if (front_) front_->sharded();
  }
  std::fill(slot_states_.begin(), slot_states_.end(), SlotState::kEmpty);
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
