// From the parameters of one unit to the plan and dtypes of their group: decides, touches no memory.
#pragma once

#include <optional>
#include <span>

#include "ragged/fsdp/options.h"
#include "ragged/fsdp/param_group.h"

namespace ragged::fsdp {

/// Elements of 16 bytes in a dtype of so many: what shards and starts are multiples of.
Index collective_unit(Index element_bytes);
/// A parameter as the planner takes it; `asked` none: a block of one unit. Throws InvalidArgument for a block that
/// doesn't fit, naming the parameter.
plan::ParamSpec param_spec(const ParamInfo& info, const std::optional<plan::Block>& asked, Index unit);

/// Plans a group for parameters of one dtype, `params[0].dtype`; `blocks[i]` none: 16 bytes. Moves groups.next_owner
/// on. Throws InvalidArgument, naming the parameter, for dtypes that differ or a block that doesn't fit. The result
/// lacks leaves.
ParamGroupSpec plan_group(
    std::span<const ParamInfo> params, std::span<const std::optional<plan::Block>> blocks,
    const comm::MeshGroups& groups, const MixedPrecision& mixed_precision, plan::PlanOptions planning = {});
/// The same for parameters whose values a front holds and gathers by itself (GroupFront::gathers): rows, as even as can
/// be.
ParamGroupSpec plan_front_group(
    std::span<const ParamInfo> params, const comm::MeshGroups& groups, const MixedPrecision& mixed_precision);

}  // namespace ragged::fsdp
