// Several groups in one collective. Which ones is the Runtime's to say; here their bytes are packed, rank by rank and
// in each rank's part group by group, so that a part is what its rank owns of all of them.
#include <cstring>
#include <memory>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "ragged/base/error.h"
#include "ragged/comm/below_autograd.h"
#include "ragged/fsdp/param_group.h"

namespace ragged::fsdp {
namespace {

using buffer::DBuffer;
using comm::BelowAutograd;

// In errors, profiles and the order check.
std::string name_of(std::span<ParamGroup* const> groups) {
  return fmt::format("{} and {} more", groups.front()->name(), groups.size() - 1);
}

Index owned_by(std::span<const plan::Segment> segments, int rank) {
  Index numel = 0;
  for (const plan::Segment& segment : segments) numel += segment.owners[static_cast<std::size_t>(rank)].size();
  return numel;
}

// The sizes that are asked for change with what merges, so they are rounded up: a few classes serve all.
at::Tensor take_staging(buffer::BufferPool& pool, Index numel, at::ScalarType dtype) {
  const Index bytes = numel * static_cast<Index>(c10::elementSize(dtype));
  Index rounded = 1;
  while (rounded < bytes) rounded *= 2;
  auto slot = std::make_shared<buffer::Slot>(pool.take(pool.add_class(buffer::SlotUse::kStaging, rounded), bytes));
  void* data = slot->data();
  return at::from_blob(
      data, {numel}, [slot](void*) mutable { slot.reset(); }, at::TensorOptions().dtype(dtype));
}

// Slices of the groups' images, in the order in which they lie in a packed buffer.
class Slices {
 public:
  /// Each slice of `image` that `rank` owns comes next.
  void add(const DBuffer& image, std::span<const plan::Segment> segments, int rank) {
    auto* bytes = static_cast<char*>(image.flat().mutable_data_ptr());
    const auto element = static_cast<Index>(image.flat().element_size());
    for (const plan::Segment& segment : segments) {
      const layout::Interval owned = segment.owners[static_cast<std::size_t>(rank)];
      if (!owned.empty()) slices_.push_back({bytes + owned.begin * element, owned.size() * element});
    }
  }
  void copy_to(const at::Tensor& packed) const {
    auto* next = static_cast<char*>(packed.mutable_data_ptr());
    for (const Slice& slice : slices_) {
      std::memcpy(next, slice.data, static_cast<std::size_t>(slice.bytes));
      next += slice.bytes;
    }
  }
  void copy_from(const at::Tensor& packed) const {
    const auto* next = static_cast<const char*>(packed.const_data_ptr());
    for (const Slice& slice : slices_) {
      std::memcpy(slice.data, next, static_cast<std::size_t>(slice.bytes));
      next += slice.bytes;
    }
  }

 private:
  struct Slice {
    char* data;
    Index bytes;
  };
  std::vector<Slice> slices_;
};

}  // namespace

void ParamGroup::unshard_together(std::span<ParamGroup* const> groups) {
  ParamGroup& first = *groups.front();
  for (const ParamGroup* group : groups) group->check_has_values();
  const comm::Communicator& shard = first.spec_.groups.shard;
  comm::ProfilerRange range("ragged::unshard", name_of(groups));
  BelowAutograd guard;
  // What padding lies between owners stays where it is; at the end of the buffer there is as much more.
  plan::Segment segment{.kind = plan::SegmentKind::kRagged};
  Index packed = 0;
  for (int rank = 0; rank < shard.size(); ++rank) {
    const Index begin = packed;
    for (const ParamGroup* group : groups) packed += owned_by(group->plan().segments, rank);
    segment.owners.push_back({begin, packed});
  }
  for (const ParamGroup* group : groups) segment.numel += group->plan().image_numel();
  const Index part = segment.numel / shard.size();
  if (std::ranges::all_of(segment.owners, [&](const auto& o) { return o.size() == part; }) && packed == segment.numel) {
    segment.kind = plan::SegmentKind::kUniform;
    segment.shard_size = part;
  }
  const at::Tensor staging = take_staging(*first.slots_.pool, segment.numel, first.spec_.param_dtype);
  Index next = segment.owners[static_cast<std::size_t>(shard.rank())].begin;
  for (ParamGroup* group : groups) {
    const at::Tensor& masters = group->masters_->flat();
    const at::Tensor own = staging.narrow(0, next, masters.numel());
    own.copy_(masters);
    group->counters.cast_in += static_cast<Index>(own.nbytes());
    next += own.numel();
  }
  comm::Work work = shard.all_gather({&segment, 1}, staging, name_of(groups));
  Slices slices;
  for (ParamGroup* group : groups) {
    group->kept_ = {};
    if (!group->image_->is_resident()) {
      group->image_->attach(group->slots_.pool->take(group->slots_.image, group->image_->nbytes()));
    }
  }
  for (int rank = 0; rank < shard.size(); ++rank) {
    for (const ParamGroup* group : groups) slices.add(*group->image_, group->plan().segments, rank);
  }
  work.on_complete([slices = std::move(slices), staging] { slices.copy_from(staging); });
  for (ParamGroup* group : groups) {
    Index whole = 0;
    for (int rank = 0; rank < shard.size(); ++rank) whole += owned_by(group->plan().segments, rank);
    group->counters.copied += whole * static_cast<Index>(c10::elementSize(group->spec_.param_dtype));
    group->gather_ = work;
    group->gathered_version_ = group->masters_->flat()._version();
    group->state_ = ShardState::kUnsharding;
  }
}

void ParamGroup::reduce_together(std::span<ParamGroup* const> groups) {
  const ParamGroup& first = *groups.front();
  const comm::Communicator& shard = first.spec_.groups.shard;
  const std::string name = name_of(groups);
  comm::ProfilerRange range("ragged::reduce", name);
  comm::PackedReduceScatter args;
  std::vector<Reduction> reductions;
  Index mine = 0;
  for (ParamGroup* group : groups) {
    DBuffer::ReduceOptions options;
    reductions.push_back(group->begin_reduction(options));
    const Index numel = owned_by(group->reduce_->segments(), shard.rank());
    args.parts.push_back(
        {.offset = mine,
         .shard = reductions.back().target->flat().narrow(0, 0, numel),
         .scale = options.scale,
         .accumulate = options.accumulate});
    mine += numel;
    args.bytes += group->reduce_->nbytes();
  }
  std::vector<Index> counts;
  Slices slices;
  const auto add = [&](int rank) {
    for (const ParamGroup* group : groups) slices.add(*group->reduce_, group->reduce_->segments(), rank);
  };
  Index packed = 0;
  for (int rank = 0; rank < shard.size(); ++rank) {
    Index numel = 0;
    for (const ParamGroup* group : groups) numel += owned_by(group->reduce_->segments(), rank);
    counts.push_back(numel);
    packed += numel;
    if (rank != shard.rank()) add(rank);
  }
  add(shard.rank());
  args.counts = counts;
  args.packed = take_staging(*first.slots_.pool, packed, first.spec_.reduce_dtype);
  slices.copy_to(args.packed);
  for (ParamGroup* group : groups) {
    Index whole = 0;
    for (int rank = 0; rank < shard.size(); ++rank) whole += owned_by(group->reduce_->segments(), rank);
    group->counters.copied += whole * static_cast<Index>(c10::elementSize(group->spec_.reduce_dtype));
    group->reduce_->detach();
    std::fill(group->slot_states_.begin(), group->slot_states_.end(), SlotState::kEmpty);
  }
  args.staging = take_staging(*first.slots_.pool, (shard.size() - 1) * mine, first.spec_.reduce_dtype);
  const comm::Work work = shard.reduce_scatter(args, name);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    reductions[i].work = work;
    reductions[i].packed = true;
    groups[i]->reduction_ = std::move(reductions[i]);
  }
}

}  // namespace ragged::fsdp
