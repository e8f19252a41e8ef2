#include "ragged/fsdp/plan_group.h"

#include <algorithm>

#include "ragged/base/error.h"
#include "ragged/plan/planner.h"

namespace ragged::fsdp {
namespace {

constexpr Index kUnitBytes = 16;  // collectives and kernels like 16-byte borders (paper.md, "NCCL alignment")

ParamGroupSpec dtypes_of(
    std::span<const ParamInfo> params, const comm::MeshGroups& groups, const MixedPrecision& mixed_precision) {
  ParamGroupSpec spec;
  spec.groups = groups;
  spec.master_dtype = params[0].dtype;
  spec.param_dtype = mixed_precision.param_dtype.value_or(spec.master_dtype);
  spec.reduce_dtype = mixed_precision.reduce_dtype.value_or(spec.param_dtype);
  return spec;
}

}  // namespace

Index collective_unit(Index element_bytes) {
  return std::max<Index>(1, kUnitBytes / element_bytes);
}

plan::ParamSpec param_spec(const ParamInfo& info, const std::optional<plan::Block>& asked, Index unit) {
  plan::ParamSpec spec;
  spec.name = info.name;
  spec.shape = info.shape;
  spec.trainable = info.requires_grad;
  const plan::Block block = asked ? *asked : plan::elements(std::max<Index>(1, std::min(unit, spec.numel())));
  const plan::BlockExtent extent = plan::block_extent(block, spec.shape, info.name);
  spec.block = extent.block;
  spec.restart = extent.restart;
  return spec;
}

ParamGroupSpec plan_front_group(
    std::span<const ParamInfo> params, const comm::MeshGroups& groups, const MixedPrecision& mixed_precision) {
  ParamGroupSpec spec = dtypes_of(params, groups, mixed_precision);
  spec.front_holds_values = true;
  std::vector<plan::ParamSpec> specs;
  for (const ParamInfo& info : params) {
    const bool has_elements = checked_product(info.shape) > 0;
    specs.push_back(param_spec(info, has_elements ? std::optional(plan::rows(1)) : std::nullopt, 1));
    // A row of the first dim, whatever the number of dims: subclasses see their pieces as [rows, ...].
    if (has_elements) {
      specs.back().block = checked_product(info.shape) / info.shape[0];
      specs.back().restart = 0;
    }
  }
  spec.plan = std::make_shared<plan::BucketPlan>(plan::plan_each_evenly(specs, groups.shard.size()));
  return spec;
}

ParamGroupSpec plan_group(
    std::span<const ParamInfo> params, std::span<const std::optional<plan::Block>> blocks,
    const comm::MeshGroups& groups, const MixedPrecision& mixed_precision, plan::PlanOptions planning) {
  ParamGroupSpec spec = dtypes_of(params, groups, mixed_precision);
  const Index narrowest =
      static_cast<Index>(std::min(c10::elementSize(spec.param_dtype), c10::elementSize(spec.reduce_dtype)));
  const Index unit = collective_unit(narrowest);
  std::vector<plan::ParamSpec> specs;
  for (std::size_t i = 0; i < params.size(); ++i) {
    RAGGED_CHECK(
        params[i].dtype == params[0].dtype,
        "[fully_shard] Expected parameters of one dtype in a unit, but got {} (param '{}') and {} (param '{}'). Shard "
        "them in different units, or convert one.",
        c10::toString(params[0].dtype), params[0].name, c10::toString(params[i].dtype), params[i].name);
    specs.push_back(param_spec(params[i], blocks[i], unit));
  }
  planning.world_size = groups.shard.size();
  planning.collective_unit = unit;
  planning.start_alignment = unit;
  planning.first_owner = *groups.next_owner;
  if (groups.shard.is_stock()) planning.strategy = plan::PlanStrategy::kSingle;
  spec.plan = std::make_shared<plan::BucketPlan>(plan::plan_bucket(specs, planning));
  for (const plan::Segment& segment : spec.plan->segments) {
    if (segment.kind != plan::SegmentKind::kRagged) continue;
    const auto owns = [](const plan::Interval& owned) { return !owned.empty(); };
    const auto owners = static_cast<int>(std::count_if(segment.owners.begin(), segment.owners.end(), owns));
    *groups.next_owner = (*groups.next_owner + owners) % groups.shard.size();
  }
  return spec;
}

}  // namespace ragged::fsdp
