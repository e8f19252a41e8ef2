// From parameter shapes and blocks to a bucket plan. A pure function: the same answer on all ranks
// without talking. After veScale-FSDP sections 5 (Algorithm 1), with the exact search for a fixed
// order: see docs/architecture.md, "The planner".
#pragma once

#include <span>
#include <vector>

#include "ragged/plan/bucket_plan.h"

namespace ragged::plan {

struct PlanOptions {
  int world_size = 1;
  /// In elements: 16 bytes of the narrowest dtype that travels with this layout (8 for bf16, 4 for
  /// fp32).
  Index collective_unit = 8;
  /// In elements; must divide collective_unit.
  Index start_alignment = 8;
};

/// Plans one bucket: one uniform segment for the trainable parameters and one for the frozen ones
/// (absent where there are none), in module order, S exact for that order. Throws InvalidArgument,
/// naming the parameter, on bad specs or options (world size < 1; block < 1 or larger than a
/// non-empty tensor; negative sizes). Blocks that restart where they don't divide the run (rows of
/// experts) are planned as whole runs.
BucketPlan plan_bucket(std::span<const ParamSpec> params, const PlanOptions& options);

/// Each parameter in a uniform segment of its own whose shards are as even as its blocks allow, collective unit and
/// start alignment 1: what tensor subclasses with a gather protocol of their own are used to (torch.chunk of rows, when
/// the block is a row). Padding as it comes.
BucketPlan plan_each_evenly(std::span<const ParamSpec> params, int world_size);

/// Plans many buckets; buckets that differ only in names are planned once.
std::vector<BucketPlan> plan_buckets(std::span<const std::vector<ParamSpec>> buckets, const PlanOptions& options);

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
