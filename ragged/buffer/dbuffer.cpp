#include "ragged/buffer/dbuffer.h"

#include <ATen/ATen.h>

#include "ragged/base/error.h"
#include "ragged/comm/below_autograd.h"

namespace ragged::buffer {
namespace {

using comm::BelowAutograd;

std::string dropped_error(const std::string& param, const std::string& unit) {
  return fmt::format(
      "[parameter] Expected '{}' to be unsharded, but got an operation on it while it is sharded (unit '{}'). Use it "
      "inside its unit's forward, call unshard() on the unit first, or take the sharded parameter.",
      param, unit);
}

}  // namespace

DBuffer::DBuffer(DBufferSpec spec, Form form) : spec_(std::move(spec)), form_(form) {
  const plan::BucketPlan& p = plan();
  num_segments_ = spec_.num_segments < 0 ? static_cast<int>(p.segments.size()) : spec_.num_segments;
  ranges_ = p.ranges(spec_.rank);
  ranges_.resize(static_cast<std::size_t>(num_segments_));
  if (form == Form::kSharded) {
    numel_ = p.local_numel(spec_.rank, num_segments_);
    return;
  }
  numel_ = p.image_numel(num_segments_);
  for (const layout::Interval gap : p.gaps()) {
    const layout::Interval inside = layout::intersect(gap, {0, numel_});
    if (!inside.empty()) gaps_.push_back(inside);
  }
  const auto bytes_each = static_cast<Index>(c10::elementSize(spec_.dtype));
  image_ = std::make_unique<DroppableStorage>(nbytes(), spec_.device, dropped_error("<image>", spec_.unit), nullptr);
  flat_ = image_->tensor(spec_.dtype, 0, {numel_});
  for (int i = 0; i < static_cast<int>(p.params.size()); ++i) {
    const plan::ParamSpec& param = p.params[static_cast<std::size_t>(i)];
    if (p.segment_of(i) >= num_segments_) {
      tensors_.emplace_back();
    } else if (form == Form::kReplicated) {
      storages_.emplace_back(param.numel() * bytes_each, spec_.device, dropped_error(param.name, spec_.unit), nullptr);
      tensors_.push_back(storages_.back().tensor(spec_.dtype, 0, param.shape));
    } else {
      tensors_.push_back(image_->tensor(spec_.dtype, p.starts[static_cast<std::size_t>(i)], param.shape));
    }
  }
}

std::span<const plan::Segment> DBuffer::segments() const {
  return std::span(plan().segments).first(static_cast<std::size_t>(num_segments_));
}

Index DBuffer::nbytes() const {
  return numel_ * static_cast<Index>(c10::elementSize(spec_.dtype));
}

void DBuffer::attach(Slot slot) {
  RAGGED_ASSERT(form_ != Form::kSharded, "attach() of a sharded buffer of '{}'", spec_.unit);
  slot_ = std::move(slot);
  image_->attach(slot_.data());
  if (form_ != Form::kReplicated) return;
  const auto bytes_each = static_cast<Index>(c10::elementSize(spec_.dtype));
  auto storage = storages_.begin();
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (!tensors_[i].defined()) continue;  // beyond the prefix
    (storage++)->attach(static_cast<char*>(slot_.data()) + plan().starts[i] * bytes_each);
  }
}

void DBuffer::attach_over(const DBuffer& other) {
  RAGGED_ASSERT(
      form_ == Form::kPartial && other.form_ == Form::kReplicated && other.is_resident() &&
          spec_.dtype == other.spec_.dtype && numel_ <= other.numel_,
      "a buffer of '{}' over one that doesn't fit", spec_.unit);
  image_->attach(other.slot_.data());
}

Slot DBuffer::detach() {
  image_->drop();
  for (DroppableStorage& storage : storages_) storage.drop();
  return std::move(slot_);
}

void DBuffer::adopt(at::Tensor flat) {
  RAGGED_ASSERT(form_ == Form::kSharded, "adopt() of a whole buffer of '{}'", spec_.unit);
  if (flat.defined()) {
    RAGGED_ASSERT(
        flat.dim() == 1 && flat.numel() == numel_ && flat.is_contiguous() && flat.scalar_type() == spec_.dtype,
        "a shard of {} elements of {} was given {} of {}", numel_, c10::toString(spec_.dtype), flat.numel(),
        c10::toString(flat.scalar_type()));
  }
  flat_ = std::move(flat);
}

bool DBuffer::is_resident() const {
  return form_ == Form::kSharded ? flat_.defined() : image_->is_resident();
}

at::Tensor DBuffer::tensor(int param) const {
  if (form_ != Form::kSharded) return tensors_[static_cast<std::size_t>(param)];
  return flat_.narrow(0, plan().local_offset(param, spec_.rank), plan().owned(param, spec_.rank).size());
}

void DBuffer::set_owner(void* owner) {
  RAGGED_ASSERT(form_ == Form::kReplicated, "only parameters have an owner");
  auto storage = storages_.begin();
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].defined()) (storage++)->set_owner(owner, static_cast<int>(i));
  }
}

void DBuffer::rename(std::string unit, std::shared_ptr<const plan::BucketPlan> plan) {
  spec_.unit = std::move(unit);
  spec_.plan = std::move(plan);
  if (image_) image_->set_error(dropped_error("<image>", spec_.unit));
  if (form_ != Form::kReplicated) return;
  auto storage = storages_.begin();
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].defined()) (storage++)->set_error(dropped_error(spec_.plan->params[i].name, spec_.unit));
  }
}

void DBuffer::cast_from(const DBuffer& shard, ByteCounters& counters) {
  BelowAutograd guard;
  for (const layout::SegmentRange& range : ranges_) {
    if (range.length == 0) continue;
    at::Tensor target = flat_.narrow(0, range.image_offset, range.length);
    target.copy_(shard.flat().narrow(0, range.local_offset, range.length));
    counters.cast_in += static_cast<Index>(target.nbytes());
  }
}

comm::Work DBuffer::all_gather(const comm::Communicator& communicator) {
  return communicator.all_gather(segments(), flat_, spec_.unit);
}

comm::Work DBuffer::all_gather_from(const DBuffer& shard, const comm::Communicator& communicator) {
  RAGGED_ASSERT(
      communicator.size() > 1 && shard.spec_.dtype == spec_.dtype, "a gather of {} ranks from {} into {}",
      communicator.size(), c10::toString(shard.spec_.dtype), c10::toString(spec_.dtype));
  return communicator.all_gather(segments(), flat_, spec_.unit, shard.flat());
}

Index DBuffer::staging_numel(
    const comm::Communicator& communicator, const DBuffer& shard, const ReduceOptions& options) const {
  // Only dtypes are looked at, so an empty stand-in serves where shard has no bytes yet.
  return communicator.staging_numel(
      {.segments = segments(),
       .image = flat_,
       .staging = {},
       .shard = shard.flat().defined() ? shard.flat() : at::empty({0}, shard.spec_.dtype),
       .scale = options.scale,
       .accumulate = options.accumulate});
}

comm::Work DBuffer::reduce_scatter(
    const comm::Communicator& communicator, DBuffer& shard, const at::Tensor& staging,
    const ReduceOptions& options) const {
  return communicator.reduce_scatter(
      {.segments = segments(),
       .image = flat_,
       .staging = staging,
       .shard = shard.flat().narrow(0, 0, plan().local_numel(spec_.rank, num_segments_)),
       .scale = options.scale,
       .accumulate = options.accumulate},
      spec_.unit);
}

comm::Work DBuffer::all_reduce(const comm::Communicator& replicas) {
  return replicas.all_reduce_sum(flat_, spec_.unit);
}

void DBuffer::zero(ByteCounters& counters) {
  BelowAutograd guard;
  flat_.zero_();
  counters.zeroed += nbytes();
}

void DBuffer::scale(double factor) {
  BelowAutograd guard;
  flat_.mul_(factor);
}

void DBuffer::add(const DBuffer& other, ByteCounters& counters) {
  BelowAutograd guard;
  flat_.add_(other.flat());
  counters.added += nbytes();
}

void DBuffer::zero_unfilled(const std::vector<char>& filled, ByteCounters& counters) {
  BelowAutograd guard;
  const auto zero = [&](const at::Tensor& part) {
    part.zero_();
    counters.zeroed += static_cast<Index>(part.nbytes());
  };
  for (const layout::Interval gap : gaps_) zero(flat_.narrow(0, gap.begin, gap.size()));
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].defined() && !filled[i] && tensors_[i].numel() > 0) zero(tensors_[i]);
  }
}

}  // namespace ragged::buffer
