// The runtime's part in merging: which of its units may go into one collective, and issuing those.
#include <algorithm>
#include <utility>

#include "ragged/fsdp/runtime.h"

namespace ragged::fsdp {
namespace {

// What is the same for gathers and reductions: one group, whose values are the group's own, on the root's shard group.
bool may_merge(const RuntimeUnit& unit, const comm::MeshGroups& groups) {
  if (unit.groups.size() != 1) return false;
  const ParamGroup& group = *unit.groups.front();
  return group.spec().groups.shard.process_group() == groups.shard.process_group() && !group.spec().offload.enabled &&
      !(group.front() && group.front()->gathers());
}

std::vector<ParamGroup*> groups_of(std::vector<RuntimeUnit>& units, const std::vector<int>& chosen) {
  std::vector<ParamGroup*> groups;
  for (const int index : chosen) groups.push_back(units[static_cast<std::size_t>(index)].groups.front().get());
  return groups;
}

}  // namespace

// 0 where nothing merges.
Index Runtime::merge_limit() const {
  const comm::Communicator& shard = groups_.shard;
  const bool can = shard.size() > 1 && shard.is_gloo() && !shard.is_stock() && groups_.device.is_cpu();
  return can ? options.merge_bytes.value_or(kMergeBytes) : 0;
}

MergeTraits Runtime::gather_merge(const RuntimeUnit& unit) const {
  if (!may_merge(unit, groups_) || unit.groups.front()->has_small_group()) return {};
  const ParamGroup& group = *unit.groups.front();
  return {.kind = static_cast<int>(group.spec().param_dtype), .bytes = group.image_bytes()};
}

// Replicas have an all-reduce to wait for, whoever looks at sums may be about to communicate, and what lies behind the
// inner units has a place of its own in the list: those go by themselves.
MergeTraits Runtime::reduce_merge(const RuntimeUnit& unit) const {
  if (!may_merge(unit, groups_) || groups_.replicate.size() > 1) return {};
  const ParamGroup& group = *unit.groups.front();
  const bool is_alone = group.spec().groups.replicate.size() > 1 || group.all_reduce_hook || group.is_behind;
  if (!group.reduces() || is_alone) return {};
  const auto addends = group.narrows_gradients() ? group.spec().param_dtype : group.spec().reduce_dtype;
  constexpr int kDtypes = 256;
  const int kind = static_cast<int>(group.spec().reduce_dtype) * kDtypes + static_cast<int>(addends);
  return {.kind = kind, .bytes = group.reduce_bytes()};
}

// As far as this forward follows the last one it is known what comes next, on all ranks alike.
void Runtime::gather_in_forward(int index) {
  const std::size_t position = order_.size() - 1;
  const bool follows = position < last_order_.size() && last_order_[position] == index;
  if (!follows || !unit(index).is_sharded()) return unshard(index);
  unshard_in_order(index, position);
}

// Gathers a sharded unit, and with it those that come after it at `position` of the last forward's order.
void Runtime::unshard_in_order(int index, std::size_t position) {
  const Index limit = merge_limit();
  if (limit == 0 || !is_small(gather_merge(unit(index)))) return unshard(index);
  std::vector<MergeTraits> traits;
  for (const RuntimeUnit& unit : units_) traits.push_back(gather_merge(unit));
  const auto needs_gather = [&](std::size_t at) {
    const RuntimeUnit& other = unit(last_order_[at]);
    return !other.groups.empty() && other.is_sharded();
  };
  std::vector<int> together;
  for (const std::size_t at : merged_gather(last_order_, position, traits, limit, needs_gather)) {
    together.push_back(last_order_[at]);
    if (at != position) gathered_ahead_.push_back(last_order_[at]);
  }
  unshard_together(together);
}

// They were chosen to go together; what has been gathered since, or can't be merged any more, doesn't.
void Runtime::unshard_together(const std::vector<int>& units) {
  if (units.size() == 1) return unshard(units.front());
  const int kind = gather_merge(unit(units.front())).kind;
  std::vector<int> merged;
  std::vector<int> alone;
  for (const int index : units) {
    const bool merges = unit(index).is_sharded() && kind >= 0 && gather_merge(unit(index)).kind == kind;
    (merges ? merged : alone).push_back(index);
  }
  if (merged.size() > 1) {
    ParamGroup::unshard_together(groups_of(units_, merged));
  } else {
    alone = units;
  }
  for (const int index : alone) unshard(index);
}

void Runtime::issue_collected_reductions() {
  const std::vector<int> units = std::exchange(collected_, {});
  const auto goes_along = [&](int index) {
    const MergeTraits traits = reduce_merge(unit(index));
    const ParamGroup& first = *unit(units.front()).groups.front();
    return traits.kind >= 0 && traits.kind == reduce_merge(unit(units.front())).kind &&
        unit(index).groups.front()->addend_dtype() == first.addend_dtype();
  };
  if (units.size() < 2 || !std::ranges::all_of(units, goes_along)) {
    for (const int index : units) issue_reduction(index, Part::kAll);
    return;
  }
  // As in issue_reduction(): one in flight. Nothing here has replicas, so there is no all-reduce to keep in order.
  finish_units(std::exchange(merged_, {}));
  if (const int last = std::exchange(scattering_, -1); last >= 0) finish_units({last});
  ParamGroup::reduce_together(groups_of(units_, units));
  for (const int index : units) {
    unreduced_[static_cast<std::size_t>(index)] = false;
    if (std::find(reduced_.begin(), reduced_.end(), index) == reduced_.end()) reduced_.push_back(index);
  }
  if (*options.overlap_reductions) {
    merged_ = units;
  } else {
    finish_units(units);
  }
}

}  // namespace ragged::fsdp
