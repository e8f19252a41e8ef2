// Several groups in one collective. Which ones is the Runtime's to say; here their bytes are packed: rank by rank, and
// in each rank's run group by group, so that a run is what the rank owns of all of them, one shard after another.
#include <cstring>
#include <memory>
#include <numeric>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "ragged/comm/below_autograd.h"
#include "ragged/fsdp/param_group.h"

namespace ragged::fsdp {
namespace {

using buffer::DBuffer;
using comm::BelowAutograd;

// In errors, profiles and the order check.
std::string name_of(std::span<ParamGroup* const> groups) {
  return fmt::format("{} to {}, {} units", groups.front()->name(), groups.back()->name(), groups.size());
}

// Memory for packed bytes. The sizes that are asked for change with what merges, so they are rounded up: a few classes
// serve all.
struct Staging {
  Staging(buffer::BufferPool& pool, Index numel, at::ScalarType dtype) {
    const Index bytes = numel * static_cast<Index>(c10::elementSize(dtype));
    Index rounded = 1;
    while (rounded < bytes) rounded *= 2;
    slot = pool.take(pool.add_class(buffer::SlotUse::kStaging, rounded), bytes);
    tensor = at::from_blob(slot.data(), {numel}, at::TensorOptions().dtype(dtype));
  }
  buffer::Slot slot;
  at::Tensor tensor;  // of numel elements
};

// Where the slices of some whole buffers lie once they are packed. Of resident buffers of one dtype.
class Packing {
 public:
  Packing(std::vector<const DBuffer*> buffers, int ranks) : buffers_(std::move(buffers)), ranks_(ranks) {
    for (int rank = 0; rank < ranks_; ++rank) {
      numels_.push_back(0);
      for (const DBuffer* buffer : buffers_) numels_.back() += owned(*buffer, rank);
    }
  }

  /// Elements of each rank's run.
  std::span<const Index> numels() const { return numels_; }
  Index numel() const { return std::accumulate(numels_.begin(), numels_.end(), Index{0}); }
  static Index owned(const DBuffer& buffer, int rank) {
    Index numel = 0;
    for (const plan::Segment& segment : buffer.segments()) {
      numel += segment.owners[static_cast<std::size_t>(rank)].size();
    }
    return numel;
  }
  /// Of all ranks: what is copied of this buffer.
  Index bytes(const DBuffer& buffer) const {
    Index numel = 0;
    for (int rank = 0; rank < ranks_; ++rank) numel += owned(buffer, rank);
    return numel * static_cast<Index>(buffer.flat().element_size());
  }

  struct Slice {
    char* data;
    std::size_t bytes;
  };
  /// The slices of this rank's run, in its order.
  void append(int rank, std::vector<Slice>& slices) const {
    for (const DBuffer* buffer : buffers_) {
      auto* data = static_cast<char*>(buffer->flat().mutable_data_ptr());
      const auto element = static_cast<Index>(buffer->flat().element_size());
      for (const plan::Segment& segment : buffer->segments()) {
        const layout::Interval slice = segment.owners[static_cast<std::size_t>(rank)];
        if (slice.empty()) continue;
        slices.push_back({data + slice.begin * element, static_cast<std::size_t>(slice.size() * element)});
      }
    }
  }

 private:
  std::vector<const DBuffer*> buffers_;
  int ranks_;
  std::vector<Index> numels_;
};

void pack(std::span<const Packing::Slice> slices, const at::Tensor& packed) {
  auto* next = static_cast<char*>(packed.mutable_data_ptr());
  for (const Packing::Slice& slice : slices) {
    std::memcpy(next, slice.data, slice.bytes);
    next += slice.bytes;
  }
}

void unpack(const at::Tensor& packed, std::span<const Packing::Slice> slices) {
  const auto* next = static_cast<const char*>(packed.const_data_ptr());
  for (const Packing::Slice& slice : slices) {
    std::memcpy(slice.data, next, slice.bytes);
    next += slice.bytes;
  }
}

// Packed runs as a segment that can be gathered. Of padding between owners nothing travels; it counts as it does in a
// gather of one unit, and lies at the end.
plan::Segment segment_of(std::span<const Index> numels, Index image_numel) {
  plan::Segment segment{.kind = plan::SegmentKind::kUniform};
  Index begin = 0;
  for (const Index numel : numels) {
    segment.owners.push_back({begin, begin + numel});
    begin += numel;
    if (numel != numels.front()) segment.kind = plan::SegmentKind::kRagged;
  }
  if (begin != image_numel) segment.kind = plan::SegmentKind::kRagged;
  segment.numel = image_numel;
  if (segment.kind == plan::SegmentKind::kUniform) segment.shard_size = numels.front();
  return segment;
}

}  // namespace

void ParamGroup::unshard_together(std::span<ParamGroup* const> groups) {
  const ParamGroup& first = *groups.front();
  const comm::Communicator& shard = first.spec_.groups.shard;
  const std::string name = name_of(groups);
  comm::ProfilerRange range("ragged::unshard", name);
  BelowAutograd guard;
  for (const ParamGroup* group : groups) group->check_has_values();
  std::vector<const DBuffer*> images;
  Index image_numel = 0;
  for (ParamGroup* group : groups) {
    DBuffer& image = *group->image_;
    if (!image.is_resident()) image.attach(group->slots_.pool->take(group->slots_.image, image.nbytes()));
    images.push_back(&image);
    image_numel += image.numel();
  }
  const Packing packing(images, shard.size());
  const plan::Segment segment = segment_of(packing.numels(), image_numel);
  const auto staging = std::make_shared<Staging>(*first.slots_.pool, image_numel, first.spec_.param_dtype);
  Index next = segment.owners[static_cast<std::size_t>(shard.rank())].begin;
  for (ParamGroup* group : groups) {
    const at::Tensor own = staging->tensor.narrow(0, next, group->masters_->numel());
    own.copy_(group->masters_->flat());
    group->counters.cast_in += static_cast<Index>(own.nbytes());
    next += own.numel();
  }
  comm::Work work = shard.all_gather({&segment, 1}, staging->tensor, name);
  std::vector<Packing::Slice> slices;
  for (int rank = 0; rank < shard.size(); ++rank) packing.append(rank, slices);
  work.on_complete([slices = std::move(slices), staging] { unpack(staging->tensor, slices); });
  for (ParamGroup* group : groups) {
    group->counters.copied += packing.bytes(*group->image_);
    group->kept_ = {};
    group->may_be_gone_ = false;
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
  std::vector<const DBuffer*> images;
  Index mine = 0;
  for (ParamGroup* group : groups) {
    DBuffer::ReduceOptions options;
    reductions.push_back(group->begin_reduction(options));
    const DBuffer& image = *group->filling_;
    const Index numel = Packing::owned(image, shard.rank());
    args.parts.push_back(
        {.offset = mine,
         .shard = reductions.back().target->flat().narrow(0, 0, numel),
         .scale = options.scale,
         .accumulate = options.accumulate});
    mine += numel;
    images.push_back(&image);
    args.bytes += image.nbytes();
  }
  const Packing packing(images, shard.size());
  std::vector<Packing::Slice> slices;
  for (int rank = 0; rank < shard.size(); ++rank) {
    if (rank != shard.rank()) packing.append(rank, slices);
  }
  packing.append(shard.rank(), slices);
  struct Buffers {
    Staging packed;
    Staging received;
  };
  buffer::BufferPool& pool = *first.slots_.pool;
  const auto dtype = images.front()->flat().scalar_type();
  const auto buffers = std::make_shared<Buffers>(
      Buffers{.packed = {pool, packing.numel(), dtype}, .received = {pool, (shard.size() - 1) * mine, dtype}});
  pack(slices, buffers->packed.tensor);
  for (ParamGroup* group : groups) {
    group->counters.copied += packing.bytes(*group->filling_);
    group->release_addends();
  }
  args.packed = buffers->packed.tensor;
  args.staging = buffers->received.tensor;
  args.counts = packing.numels();
  args.memory = buffers;
  const comm::Work work = shard.reduce_scatter(args, name);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    reductions[i].work = work;
    reductions[i].packed = true;
    groups[i]->reduction_ = std::move(reductions[i]);
  }
}

}  // namespace ragged::fsdp
