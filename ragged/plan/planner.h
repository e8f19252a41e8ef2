// From parameter shapes and blocks to a bucket plan. A pure function: the same answer on all ranks
// without talking. After veScale-FSDP section 5, with exact shard sizes, buckets that split into
// several uniform segments and a ragged tail: see docs/architecture.md, "The planner".
#pragma once

#include <span>
#include <vector>

#include "ragged/plan/bucket_plan.h"

namespace ragged::plan {

enum class PlanStrategy {
  kAuto,    // the cheapest partition into uniform segments and a ragged tail
  kSingle,  // one uniform segment in module order, exact for it
  kPaper,   // the same by the paper's own search: within a factor 2 of kSingle
};

/// Orders of the tensors in a segment that are tried; module order stays where it ties.
enum class PlanOrder { kAuto, kModule, kBlock, kShape };

/// What a plan costs besides the elements of its image, in elements. The defaults say: another
/// collective has to save as much as travels in about a microsecond.
struct PlanCost {
  Index uniform_segment = 32768;
  Index ragged_segment = 32768;
  Index ragged_block = 512;  // one more root of the grouped broadcast

  friend bool operator==(const PlanCost&, const PlanCost&) = default;
};

struct PlanOptions {
  int world_size = 1;
  /// In elements: 16 bytes of the narrowest dtype that travels with this layout (8 for bf16, 4 for
  /// fp32).
  Index collective_unit = 8;
  /// In elements; must divide collective_unit.
  Index start_alignment = 8;
  PlanStrategy strategy = PlanStrategy::kAuto;

  // The rest is for kAuto.

  /// For the trainable parameters, and as many for the frozen ones. At least 1.
  int max_uniform_segments = 3;
  /// Of the whole bucket; 0: no ragged tail.
  Index max_ragged_blocks = 64;
  PlanOrder order = PlanOrder::kAuto;
  PlanCost cost{};
  /// The rank where the ragged tail's owners begin. plan_buckets() moves it on from bucket to bucket
  /// and hands blocks to the ranks that have the fewest elements in tails.
  int first_owner = 0;
  /// Blocks run over the rows of a stack instead of restarting at each matrix: the plan's parameters
  /// have no restarts. Not for quantisers that scale per matrix. Holds for every strategy.
  bool flat_rows = false;
};

/// What a plan reaches and what could be reached, in elements of the image.
struct PlanReport {
  Index numel = 0;
  Index image = 0;
  Index uniform_only = 0;   // the best without a ragged tail, at the same cost of segments
  Index uniform_bound = 0;  // packing bound: equal shards, any number of segments
  Index bound = 0;          // with as many ragged blocks as the options allow
  Index ragged_numel = 0;   // in the tail
  Index ragged_blocks = 0;
  int num_uniform_segments = 0;  // with elements
  int num_ragged_segments = 0;
  bool is_exact = true;  // false: the search was thinned out or cut off, and better may exist

  Index padding() const { return image - numel; }
  int collectives() const { return num_uniform_segments + num_ragged_segments; }
};

/// Plans one bucket. Trainable and frozen parameters lie in segments apart, trainable first; each
/// side is uniform segments, then the ragged tail. Throws InvalidArgument, naming the parameter, on
/// bad specs or options (world size < 1; block < 1 or larger than a non-empty tensor; negative
/// sizes). In uniform segments, blocks that restart where they don't divide the run (rows of experts)
/// are kept together as whole runs. With a `report`, the best without a ragged tail is searched too.
BucketPlan plan_bucket(std::span<const ParamSpec> params, const PlanOptions& options, PlanReport* report = nullptr);

/// Each parameter in a uniform segment of its own whose shards are as even as its blocks allow, collective unit and
/// start alignment 1: what tensor subclasses with a gather protocol of their own are used to (torch.chunk of rows, when
/// the block is a row). Padding as it comes.
BucketPlan plan_each_evenly(std::span<const ParamSpec> params, int world_size);

/// Plans many buckets; buckets that differ only in names are planned once. Owners of ragged tails
/// take turns. With `reports`, one a bucket.
std::vector<BucketPlan> plan_buckets(
    std::span<const std::vector<ParamSpec>> buckets, const PlanOptions& options,
    std::vector<PlanReport>* reports = nullptr);

/// A tensor as the search sees it.
struct Extent {
  Index numel = 0;
  Index block = 1;
};

/// A shard size and the starts that go with it (earliest legal start for each).
struct UniformLayout {
  Index shard_size = 0;
  std::vector<Index> starts;
};

/// Exact smallest shard size for this order. Start alignment must divide the collective unit.
/// Throws InvalidArgument as plan_bucket does, naming a tensor by its index. Time grows with the
/// number of distinct least common multiples of blocks; past 16,384 of those that matter (real
/// buckets have tens) the rest is skipped, and only plan_uniform_paper's factor of 2 is certain.
UniformLayout plan_uniform(
    std::span<const Extent> tensors, int world_size, Index collective_unit, Index start_alignment);

/// The paper's own search (prefixes of the tensors by element count, binary search on multiples of
/// their LCM): within a factor 2 of plan_uniform, of which it is the first step; kept for
/// comparison.
UniformLayout plan_uniform_paper(
    std::span<const Extent> tensors, int world_size, Index collective_unit, Index start_alignment);

/// Packing bound: no layout with equal shards has a smaller one, in any order and with any number
/// of uniform segments. It counts blocks and doesn't see that a tensor must be contiguous.
Index shard_size_lower_bound(std::span<const Extent> tensors, int world_size, Index collective_unit);

}  // namespace ragged::plan
