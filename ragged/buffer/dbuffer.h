// DBuffer: executes a bucket plan. One buffer holds a whole bucket in one dtype, either this rank's shard or the
// whole image, and acts on it as one operation. After veScale-FSDP section 5 (grouped RaggedShard); the plan decides
// where everything lies, this file only moves it. See [Note: image, segments, shard] in plan/bucket_plan.h.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ragged/buffer/byte_counters.h"
#include "ragged/buffer/droppable_storage.h"
#include "ragged/buffer/pool.h"
#include "ragged/comm/communicator.h"
#include "ragged/layout/mesh.h"
#include "ragged/plan/bucket_plan.h"

namespace ragged::buffer {

/// What the bytes mean on the shard dim of the mesh.
enum class Form {
  kSharded,     // this rank's ranges, concatenated
  kReplicated,  // the whole image, equal on all ranks once gathered
  kPartial,     // the whole image, this rank's addend
};

struct DBufferSpec {
  std::string unit;  // names it in errors and profiles
  layout::Mesh mesh = layout::Mesh::shard(1);
  std::shared_ptr<const plan::BucketPlan> plan;
  int num_segments = -1;  // a prefix of the plan's segments; -1: all
  int rank = 0;           // in the shard group
  at::ScalarType dtype = at::kFloat;
  c10::Device device = c10::Device(c10::kCPU);
};

/// Owns views, not policies: memory is given (attach, or a tensor) and taken at points the caller chooses.
/// All operations run below autograd and bump no version counter. Not thread-safe; neither copied nor moved.
class DBuffer {
 public:
  DBuffer(DBufferSpec spec, Form form);
  DBuffer(const DBuffer&) = delete;
  DBuffer& operator=(const DBuffer&) = delete;

  Form form() const { return form_; }
  const plan::BucketPlan& plan() const { return *spec_.plan; }
  const layout::Mesh& mesh() const { return spec_.mesh; }
  std::span<const plan::Segment> segments() const;
  std::span<const layout::SegmentRange> ranges() const { return ranges_; }
  /// Elements of flat(): of the image, or of this rank's shard.
  Index numel() const { return numel_; }
  Index nbytes() const;

  // --- memory ---
  /// Whole forms: points every view at the slot's bytes. Sharded form: use adopt().
  void attach(Slot slot);
  /// kPartial: lies over another whole buffer of the same plan and dtype, whose slot stays its own, until detach().
  void attach_over(const DBuffer& other);
  /// Drops the bytes and returns the slot. Views stay and raise until the next attach().
  Slot detach();
  /// Sharded form: a 1-D contiguous tensor of numel() elements becomes the bytes; undefined drops them.
  void adopt(at::Tensor flat);
  bool is_resident() const;

  // --- views ---
  const at::Tensor& flat() const { return flat_; }
  /// Whole forms: parameter i in its own shape; one tensor for the buffer's life, with a storage object of its own
  /// (kReplicated), so that an op on it while dropped raises an error that names it. Sharded: its 1-D piece.
  at::Tensor tensor(int param) const;
  /// kReplicated only: marks the storage behind tensor(i), see DroppableStorage::owner_of and index_of (i).
  void set_owner(void* owner);
  /// The same layout under other names: in errors (of ops on dropped bytes too) and profiles.
  void rename(std::string unit, std::shared_ptr<const plan::BucketPlan> plan);

  // --- operations on the whole bucket ---
  /// Casts a shard into this rank's ranges of a whole buffer.
  void cast_from(const DBuffer& shard, ByteCounters& counters);
  comm::Work all_gather(const comm::Communicator& communicator);
  /// The same with this rank's ranges taken from a shard of the same dtype, which the collective reads: no copy before
  /// it. The shard must keep its values until the work is waited for. At least two ranks.
  comm::Work all_gather_from(const DBuffer& shard, const comm::Communicator& communicator);
  struct ReduceOptions {
    double scale = 1.0;
    bool accumulate = false;
  };
  /// kPartial: the sum over ranks of these images into `shard`'s ranges. `staging` must have staging_numel()
  /// elements of this dtype. Everything must live until the work is waited for.
  comm::Work reduce_scatter(
      const comm::Communicator& communicator, DBuffer& shard, const at::Tensor& staging,
      const ReduceOptions& options) const;
  Index staging_numel(const comm::Communicator& communicator, const DBuffer& shard, const ReduceOptions& options) const;
  /// Sharded: sum over the replicas of this shard, in place.
  comm::Work all_reduce(const comm::Communicator& replicas);
  void zero(ByteCounters& counters);
  void scale(double factor);
  void add(const DBuffer& other, ByteCounters& counters);
  /// Whole forms: zeroes the padding and the parameters that aren't filled, and nothing else.
  void zero_unfilled(const std::vector<char>& filled, ByteCounters& counters);

 private:
  DBufferSpec spec_;
  Form form_;
  int num_segments_;
  std::vector<layout::SegmentRange> ranges_;
  Index numel_ = 0;
  Slot slot_;
  std::unique_ptr<DroppableStorage> image_;
  std::deque<DroppableStorage> storages_;  // of the parameters, kReplicated
  std::vector<at::Tensor> tensors_;        // whole forms
  std::vector<layout::Interval> gaps_;     // within the prefix
  at::Tensor flat_;
};

}  // namespace ragged::buffer
