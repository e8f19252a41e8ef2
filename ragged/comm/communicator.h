// The collectives RaggedFSDP needs, in place, over one c10d process group. It decides which primitive carries each
// of them on the group's backend; it doesn't decide when.
//
// [Note: which primitive]
// Calls go through c10d::ProcessGroup, never a Backend, so that profilers, flight recorders and groups written in
// Python see them. On NCCL a uniform segment is one all-gather or reduce-scatter on the image itself. Gloo's own
// all-gather and reduce-scatter copy inside; broadcasts of slices in place and an all-to-all followed by a local sum
// are faster there from some tens of kilobytes on (docs/benchmarks.md), and the sum runs in rank order in fp32, so
// its bits depend on nothing but the inputs. Two ranks send each other just the other's slice, received where the sum
// will be. Where a gather's own part lies elsewhere, two ranks scatter their slices to both, so that the owner's image
// has them too. Ragged segments travel as broadcasts from their owners, and reduce by an uneven all-to-all on every
// backend. `stock` issues what FSDP2 does, for comparison and for tests that count.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "ragged/comm/traffic.h"
#include "ragged/comm/work.h"
#include "ragged/plan/bucket_plan.h"

namespace ragged::comm {

enum class Collectives { kAuto, kStock };

struct CommOptions {
  Collectives collectives = Collectives::kAuto;
  /// Ranks compare (sequence number, unit, operation) before each collective. Slow; also RAGGED_CHECK=1.
  bool check_order = false;
  /// Longest wait for one collective; none: the group's own time-out.
  std::optional<std::chrono::milliseconds> deadline{};
};

/// How a bucket is reduced. Tensors are 1-D and contiguous.
struct ReduceScatter {
  std::span<const plan::Segment> segments;  // a prefix of the plan's; must outlive the operation
  at::Tensor image;                         // this rank's addend, the segments' image, in the reduce dtype
  at::Tensor staging;       // staging_numel() elements of image's dtype; may be undefined when that is 0
  at::Tensor shard;         // receives this rank's ranges, concatenated
  double scale = 1.0;       // the sum is multiplied by it
  bool accumulate = false;  // add to what shard holds instead of overwriting it
};

/// Several reductions as one, of shards that lie anywhere. The caller packed the addends; tensors are 1-D and
/// contiguous.
struct PackedReduceScatter {
  at::Tensor packed;              // counts[k] elements for each other rank k, in rank order; then this rank's own
  std::span<const Index> counts;  // elements of the sum that each rank is to have
  at::Tensor staging;             // (size() - 1) * counts[rank()] elements of packed's dtype
  struct Part {
    Index offset = 0;  // within what this rank has
    at::Tensor shard;  // receives the sum of as many elements
    double scale = 1.0;
    bool accumulate = false;
  };
  std::vector<Part> parts;
  Index bytes = 0;                       // of the images that were packed, for traffic()
  std::shared_ptr<const void> memory{};  // dropped once the work was waited for; c10d may hold its tensors for longer
};

/// Cheap to copy; copies share counters. Default-constructed: a group of one, which moves nothing.
/// Not thread-safe: all ranks must issue the same operations in the same order anyway.
class Communicator {
 public:
  Communicator();
  /// Takes a group made by anybody (torch.distributed, World). `name` appears in errors.
  Communicator(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, CommOptions options, std::string name);

  int rank() const;
  int size() const;
  bool is_stock() const;
  bool is_gloo() const;
  bool checks_order() const;
  c10::Device device() const;
  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const;

  /// `image` holds this rank's owned intervals; afterwards it holds all of them. Never touches padding between them.
  /// Where `own` is given (1-D, this rank's intervals in the segments' order, image's dtype) they are taken from there,
  /// whatever image holds; it must stay as it is until the work is waited for. A group of one moves nothing.
  /// `own` is for segments that takes_own_part() says yes to.
  Work all_gather(
      std::span<const plan::Segment> segments, const at::Tensor& image, std::string_view unit,
      const at::Tensor& own = {}) const;

  /// Whether all_gather can read this rank's part of these segments from elsewhere without a copy of ours. Not where
  /// slices travel as broadcasts: on Gloo from three ranks on, where scatters are slower; ragged ones on other
  /// backends.
  bool takes_own_part(std::span<const plan::Segment> segments) const;

  Work reduce_scatter(const ReduceScatter& args, std::string_view unit) const;
  /// Elements of staging that reduce_scatter needs for these arguments (staging itself is ignored).
  Index staging_numel(const ReduceScatter& args) const;
  /// One uneven all-to-all and sums in rank order, with the bits of reduce_scatter() where that goes the same way. At
  /// least two ranks.
  Work reduce_scatter(const PackedReduceScatter& args, std::string_view unit) const;
  /// Whether reduce_scatter() moves addends as they are and sums them in fp32 after that, so that addends of a narrower
  /// dtype give the bits of the same ones widened before.
  bool sums_after_transfer(std::span<const plan::Segment> segments) const;

  /// In place.
  Work all_reduce_sum(const at::Tensor& tensor, std::string_view unit) const;
  Work all_reduce_max(const at::Tensor& tensor, std::string_view unit) const;
  Work broadcast(const at::Tensor& tensor, int root, std::string_view unit) const;
  /// Rank k gets the k-th run of `send`, send_counts[k] elements, and its own goes to the k-th run of rank k's
  /// `receive`. 1-D contiguous tensors of one dtype, any dtype: bytes travel. Counts may be zero; every rank takes
  /// part. Throws InvalidArgument on counts that don't fit this rank's tensors.
  Work all_to_all(
      const at::Tensor& send, const at::Tensor& receive, std::span<const Index> send_counts,
      std::span<const Index> receive_counts, std::string_view unit) const;
  void barrier() const;

  const Traffic& traffic() const;
  double wait_seconds() const;

 private:
  Work all_reduce(const at::Tensor& tensor, bool max, std::string_view unit) const;
  compat::WorkPtr broadcast_from(std::vector<at::Tensor>& tensors, int root) const;
  compat::WorkPtr scatter(std::vector<at::Tensor>& outputs, const at::Tensor& source, int root) const;
  bool reduces_by_all_to_all(const plan::Segment& segment) const;

  std::shared_ptr<GroupState> state_;
};

}  // namespace ragged::comm
