// From parameter shapes and blocks to a bucket plan. A pure function: the same answer on all ranks without talking.
// After veScale-FSDP sections 5 (Algorithm 1), with the exact search for a fixed order: see
// docs/architecture.md, "The planner".
#pragma once

#include <span>
#include <vector>

#include "ragged/plan/bucket_plan.h"

namespace ragged::plan {

struct PlanOptions {
  int world_size = 1;
  /// In elements: 16 bytes of the narrowest dtype that travels with this layout (8 for bf16, 4 for fp32).
  Index collective_unit = 8;
  /// In elements; must divide collective_unit.
  Index start_alignment = 8;
};

/// Plans one bucket: one uniform segment for the trainable parameters and one for the frozen ones (absent where
/// there are none), in module order, S exact for that order. Throws InvalidArgument, naming the parameter, on bad
/// specs or options (world size < 1; block < 1 or larger than a non-empty tensor; negative sizes).
BucketPlan plan_bucket(std::span<const ParamSpec> params, const PlanOptions& options);

/// Plans many buckets; buckets that differ only in names are planned once.
std::vector<BucketPlan> plan_buckets(
    std::span<const std::vector<ParamSpec>> buckets, const PlanOptions& options);

/// A tensor as the search sees it.
struct Extent {
  Index numel = 0;
  Index block = 1;
};

/// Exact smallest shard size for this order, and the starts that go with it (earliest legal start for each).
struct UniformLayout {
  Index shard_size = 0;
  std::vector<Index> starts;
};
UniformLayout plan_uniform(
    std::span<const Extent> tensors, int world_size, Index collective_unit, Index start_alignment);

/// The paper's own search (prefixes of the tensors by element count, binary search on multiples of their LCM):
/// within a factor 2 of plan_uniform; kept for comparison.
UniformLayout plan_uniform_paper(
    std::span<const Extent> tensors, int world_size, Index collective_unit, Index start_alignment);

/// Packing bound on the shard size of any layout with equal shards, in any order: planner_bounds section 3 (see docs).
Index shard_size_lower_bound(std::span<const Extent> tensors, int world_size, Index collective_unit);

}  // namespace ragged::plan
