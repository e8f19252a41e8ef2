// From parameters to a bucket plan; the search for one segment's shard size is in
// uniform_search.cpp.
#include "ragged/plan/planner.h"

#include <algorithm>
#include <map>

#include "ragged/plan/uniform_search.h"

namespace ragged::plan {
namespace {

std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}

Index checked_numel(const ParamSpec& param) {
  for (Index size : param.shape) {
    RAGGED_CHECK(size >= 0, "[plan] Expected sizes >= 0, but got {} (param '{}').", size, param.name);
  }
  try {
    return param.numel();
  } catch (const InvalidArgument&) {
    RAGGED_CHECK(false, "[plan] Expected a tensor of fewer than 2^63 elements, but got more (param '{}').", param.name);
  }
  return 0;
}

void check(const ParamSpec& param) {
  const Index numel = checked_numel(param);
  RAGGED_CHECK(
      param.block >= 1, "[plan] Expected a block of at least 1, but got {} (param '{}').", param.block, param.name);
  RAGGED_CHECK(
      numel == 0 || param.block <= numel,
      "[plan] Expected a block of at most the tensor's {} elements, but got {} (param '{}'). Use a "
      "smaller block, or whole() to keep the tensor on one rank.",
      numel, param.block, param.name);
  RAGGED_CHECK(
      param.restart == 0 || param.restart >= param.block,
      "[plan] Expected blocks to restart every {} elements or more, the size of a block, but got "
      "{} (param '{}').",
      param.block, param.restart, param.name);
}

void check(const PlanOptions& options) {
  RAGGED_CHECK(options.world_size >= 1, "[plan] Expected a world size of at least 1, but got {}.", options.world_size);
  RAGGED_CHECK(
      options.collective_unit >= 1, "[plan] Expected a collective unit of at least 1, but got {}.",
      options.collective_unit);
  RAGGED_CHECK(
      options.start_alignment >= 1 && options.collective_unit % options.start_alignment == 0,
      "[plan] Expected a start alignment that divides the collective unit {}, but got {}.", options.collective_unit,
      options.start_alignment);
}

// Blocks that restart where they don't divide the run: borders at a fixed distance hit block
// borders in every run only if they hit run borders, so a whole run is the block.
Extent search_extent(const ParamSpec& param) {
  const Index numel = param.numel();
  const bool has_short_blocks = param.restart > 0 && param.restart % param.block != 0;
  if (!has_short_blocks || numel == 0) return {numel, param.block};
  return {numel, std::min(param.restart, numel)};
}

void add_segment(BucketPlan& plan, bool trainable) {
  Segment segment{.image_offset = plan.image_numel(), .trainable = trainable};
  std::vector<Extent> extents;
  detail::PieceCounts pieces;  // for the bound: the true blocks, not whole runs
  for (int i = 0; at(i) < plan.params.size(); ++i) {
    const ParamSpec& param = plan.params[at(i)];
    if (param.trainable != trainable) continue;
    segment.params.push_back(i);
    extents.push_back(search_extent(param));
    detail::add_pieces(pieces, extents.back().numel, param.block, param.restart);
  }
  if (segment.params.empty()) return;

  const UniformLayout found = plan_uniform(extents, plan.world_size, plan.collective_unit, plan.start_alignment);
  for (std::size_t i = 0; i < segment.params.size(); ++i) {
    plan.starts[at(segment.params[i])] = segment.image_offset + found.starts[i];
  }
  segment.shard_size = found.shard_size;
  segment.numel = plan.world_size * found.shard_size;
  segment.owners.reserve(at(plan.world_size));
  for (Index rank = 0; rank < plan.world_size; ++rank) {
    const Index begin = segment.image_offset + rank * found.shard_size;
    segment.owners.push_back({begin, begin + found.shard_size});
  }
  plan.lower_bound += plan.world_size * detail::bound_for_pieces(pieces, plan.world_size, plan.collective_unit);
  plan.segments.push_back(std::move(segment));
}

// All that a plan depends on but the names.
std::vector<Index> shape_key(std::span<const ParamSpec> params) {
  std::vector<Index> key;
  for (const ParamSpec& param : params) {
    key.push_back(static_cast<Index>(param.shape.size()));
    key.insert(key.end(), param.shape.begin(), param.shape.end());
    key.insert(key.end(), {param.block, param.restart, param.trainable ? 1 : 0});
  }
  return key;
}

}  // namespace

BucketPlan plan_bucket(std::span<const ParamSpec> params, const PlanOptions& options) {
  check(options);
  // A quarter of what the search can count, so that it names the parameter and the segments' sum
  // fits.
  const Index limit = std::numeric_limits<Index>::max() / 16 / options.world_size;
  Index numel = 0;
  for (const ParamSpec& param : params) {
    check(param);
    RAGGED_CHECK(
        param.numel() <= limit - numel,
        "[plan] Expected a bucket of at most {} elements for {} ranks, but got more (param '{}'). "
        "Make it smaller.",
        limit, options.world_size, param.name);
    numel += param.numel();
  }
  BucketPlan plan{
      .world_size = options.world_size,
      .collective_unit = options.collective_unit,
      .start_alignment = options.start_alignment,
      .params = {params.begin(), params.end()},
      .starts = std::vector<Index>(params.size(), 0)};
  add_segment(plan, true);
  add_segment(plan, false);
  return plan;
}

BucketPlan plan_each_evenly(std::span<const ParamSpec> params, int world_size) {
  BucketPlan plan;
  plan.world_size = world_size;
  plan.params.assign(params.begin(), params.end());
  plan.starts.assign(params.size(), 0);
  Index offset = 0;
  for (const bool trainable : {true, false}) {  // trainable segments come first
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (params[i].trainable != trainable) continue;
      BucketPlan one = plan_bucket(params.subspan(i, 1), {world_size, 1, 1});
      plan.lower_bound += one.lower_bound;
      plan.starts[i] = one.starts[0] + offset;
      for (Segment& segment : one.segments) {
        segment.image_offset += offset;
        for (Interval& owner : segment.owners) owner = owner.shifted(offset);
        for (int& param : segment.params) param = static_cast<int>(i);
        plan.segments.push_back(std::move(segment));
      }
      offset += one.image_numel();
    }
  }
  return plan;
}

std::vector<BucketPlan> plan_buckets(std::span<const std::vector<ParamSpec>> buckets, const PlanOptions& options) {
  check(options);
  std::vector<BucketPlan> plans;
  plans.reserve(buckets.size());
  std::map<std::vector<Index>, std::size_t> planned;  // shapes -> index of the plan to copy
  for (const std::vector<ParamSpec>& bucket : buckets) {
    const auto [found, is_new] = planned.try_emplace(shape_key(bucket), plans.size());
    if (is_new) {
      plans.push_back(plan_bucket(bucket, options));
    } else {
      BucketPlan plan = plans[found->second];
      plan.params = bucket;
      plans.push_back(std::move(plan));
    }
  }
  return plans;
}

}  // namespace ragged::plan
