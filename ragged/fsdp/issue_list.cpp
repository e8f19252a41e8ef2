#include "ragged/fsdp/issue_list.h"

#include <algorithm>

#include "ragged/base/error.h"

namespace ragged::fsdp {
namespace {

struct Calls {
  std::vector<int> unit;    // by call
  std::vector<char> needs;  // by call
  std::vector<BackwardStep> steps;
};

Calls reverse(std::span<const ForwardEvent> events) {
  Calls calls;
  std::vector<int> open;
  std::vector<BackwardStep> forward;
  for (const ForwardEvent& event : events) {
    if (event.is_begin) {
      open.push_back(static_cast<int>(calls.unit.size()));
      calls.unit.push_back(event.unit);
      calls.needs.push_back(event.needs_backward);
      forward.push_back({true, open.back(), event.unit});
    } else {
      RAGGED_ASSERT(
          !open.empty() && calls.unit[static_cast<std::size_t>(open.back())] == event.unit,
          "forward events of unit {} aren't nested", event.unit);
      forward.push_back({false, open.back(), event.unit});
      open.pop_back();
    }
  }
  RAGGED_ASSERT(open.empty(), "{} forward events without an end", open.size());
  for (auto it = forward.rbegin(); it != forward.rend(); ++it) {
    if (calls.needs[static_cast<std::size_t>(it->call)]) calls.steps.push_back({!it->begins, it->call, it->unit});
  }
  return calls;
}

// The unit whose backward begins next after step s; -1 when none does. Modules sharded as one list run one after
// another, and their unit needn't be dropped in between.
int next_begun(const Calls& calls, std::size_t s) {
  for (++s; s < calls.steps.size(); ++s) {
    if (calls.steps[s].begins) return calls.unit[static_cast<std::size_t>(calls.steps[s].call)];
  }
  return -1;
}

// Marks the reductions that wait for the next one. Before the tail all are out: backwards of other forwards, which may
// run in between, fill the same buffers.
void merge_reductions(IssueList& list, std::span<const UnitTraits> units, Index merge_bytes) {
  Issue* last = nullptr;
  MergeRun run({}, merge_bytes);
  for (Issue& issue : std::span(list.issues).first(static_cast<std::size_t>(list.tail))) {
    if (issue.kind != IssueKind::kReduce) continue;
    const MergeTraits& reduction = units[static_cast<std::size_t>(issue.unit)].reduction;
    if (last && run.take(reduction)) {
      last->with_next = true;
    } else {
      run = MergeRun(reduction, merge_bytes);
    }
    last = &issue;
  }
}

}  // namespace

std::vector<BackwardStep> backward_steps(std::span<const ForwardEvent> events) {
  return reverse(events).steps;
}

IssueList build_issue_list(
    std::span<const ForwardEvent> events, std::span<const UnitTraits> units, int prefetch, Index merge_bytes) {
  const Calls calls = reverse(events);
  const auto unit_of = [&](int call) { return calls.unit[static_cast<std::size_t>(call)]; };
  const auto traits = [&](int unit) -> const UnitTraits& { return units[static_cast<std::size_t>(unit)]; };

  // First, without prefetch: which calls gather, and what each does when backward leaves it.
  std::vector<char> resident;
  for (const UnitTraits& unit : units) resident.push_back(unit.resident);
  std::vector<int> remaining(units.size(), 0);
  for (const BackwardStep& step : calls.steps) remaining[static_cast<std::size_t>(unit_of(step.call))] += step.begins;
  std::vector<char> gathers(calls.unit.size(), 0);
  std::vector<char> reshards(calls.unit.size(), 0);
  std::vector<char> reduces(calls.unit.size(), 0);
  std::vector<int> begin_order;  // calls in the order backward begins them
  for (std::size_t s = 0; s < calls.steps.size(); ++s) {
    const BackwardStep& step = calls.steps[s];
    const int unit = unit_of(step.call);
    const auto u = static_cast<std::size_t>(unit);
    const auto c = static_cast<std::size_t>(step.call);
    if (step.begins) {
      begin_order.push_back(step.call);
      gathers[c] = traits(unit).has_params && traits(unit).gathers_in_backward && !resident[u];
      resident[u] = true;
      continue;
    }
    const bool last = --remaining[u] == 0;
    reduces[c] = last && traits(unit).has_params && traits(unit).reduces;
    const bool drops = last ? traits(unit).reshard_after_backward : traits(unit).reshard_after_forward;
    reshards[c] = traits(unit).has_params && drops && next_begun(calls, s) != unit;
    if (reshards[c]) resident[u] = false;
  }

  // Then the list itself. A gather may move up by `prefetch` calls, and as far as it merges, but never above the
  // reshard of an earlier call of the same unit.
  IssueList list;
  list.pre_backward.assign(calls.unit.size(), 0);
  list.post_backward.assign(calls.unit.size(), 0);
  std::vector<char> issued(calls.unit.size(), 0);
  std::vector<char> occupied;
  for (const UnitTraits& unit : units) occupied.push_back(unit.resident);
  std::vector<int> begin_units;
  for (const int call : begin_order) begin_units.push_back(unit_of(call));
  std::vector<MergeTraits> gather_merges;
  for (const UnitTraits& unit : units) gather_merges.push_back(unit.gather);
  const auto is_due = [&](std::size_t position) {
    const auto c = static_cast<std::size_t>(begin_order[position]);
    return gathers[c] && !issued[c] && !occupied[static_cast<std::size_t>(begin_units[position])];
  };
  const auto gather = [&](std::size_t first) {
    if (!is_due(first)) return;
    const std::vector<std::size_t> together = merged_gather(begin_units, first, gather_merges, merge_bytes, is_due);
    for (const std::size_t position : together) {
      list.issues.push_back(
          {.kind = IssueKind::kGather,
           .unit = begin_units[position],
           .call = begin_order[position],
           .with_next = position != together.back()});
      issued[static_cast<std::size_t>(begin_order[position])] = true;
      occupied[static_cast<std::size_t>(begin_units[position])] = true;
    }
  };
  std::size_t begun = 0;
  std::vector<int> open;
  std::vector<char> entered(calls.unit.size(), 0);  // by call: backward is or was in one inside it
  for (const BackwardStep& step : calls.steps) {
    const auto c = static_cast<std::size_t>(step.call);
    if (step.begins) {
      if (!open.empty() && !entered[static_cast<std::size_t>(open.back())]) {
        const int around = open.back();
        entered[static_cast<std::size_t>(around)] = true;
        if (reduces[static_cast<std::size_t>(around)] && traits(unit_of(around)).reduces_behind) {
          list.issues.push_back({IssueKind::kReduceBehind, unit_of(around), around});
        }
      }
      open.push_back(step.call);
      const std::vector<int>& named = traits(unit_of(step.call)).prefetch;
      const std::size_t ahead = named.empty() ? static_cast<std::size_t>(prefetch) : 0;
      const std::size_t until = std::min(begin_order.size(), begun + ahead + 1);
      for (std::size_t i = begun; i < until; ++i) gather(i);
      for (const int unit : named) {
        const auto next = std::find_if(
            begin_order.begin() + static_cast<std::ptrdiff_t>(begun), begin_order.end(),
            [&](int call) { return unit_of(call) == unit && !issued[static_cast<std::size_t>(call)]; });
        if (next != begin_order.end()) gather(static_cast<std::size_t>(next - begin_order.begin()));
      }
      ++begun;
      list.pre_backward[c] = static_cast<int>(list.issues.size());
      continue;
    }
    open.pop_back();
    const int unit = unit_of(step.call);
    if (step.call == 0) list.tail = static_cast<int>(list.issues.size());  // call 0 is the root's
    if (reshards[c]) {  // before the reduction, which takes memory of its own
      list.issues.push_back({IssueKind::kReshard, unit, step.call});
      occupied[static_cast<std::size_t>(unit)] = false;
    }
    if (reduces[c]) list.issues.push_back({IssueKind::kReduce, unit, step.call});
    list.post_backward[c] = static_cast<int>(list.issues.size());
  }
  merge_reductions(list, units, merge_bytes);
  return list;
}

}  // namespace ragged::fsdp
