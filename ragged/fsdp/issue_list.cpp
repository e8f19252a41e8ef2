#include "ragged/fsdp/issue_list.h"

#include <algorithm>

#include "ragged/base/error.h"

namespace ragged::fsdp {
namespace {

// Backward in the order it will come: a call begins where its forward ended, and the other way round.
struct Step {
  bool begins = true;
  int call = 0;
};

struct Calls {
  std::vector<int> unit;    // by call
  std::vector<char> needs;  // by call
  std::vector<Step> steps;
};

Calls reverse(std::span<const ForwardEvent> events) {
  Calls calls;
  std::vector<int> open;
  std::vector<Step> forward;
  for (const ForwardEvent& event : events) {
    if (event.is_begin) {
      open.push_back(static_cast<int>(calls.unit.size()));
      calls.unit.push_back(event.unit);
      calls.needs.push_back(event.needs_backward);
      forward.push_back({true, open.back()});
    } else {
      RAGGED_ASSERT(
          !open.empty() && calls.unit[static_cast<std::size_t>(open.back())] == event.unit,
          "forward events of unit {} aren't nested", event.unit);
      forward.push_back({false, open.back()});
      open.pop_back();
    }
  }
  RAGGED_ASSERT(open.empty(), "{} forward events without an end", open.size());
  for (auto it = forward.rbegin(); it != forward.rend(); ++it) {
    if (calls.needs[static_cast<std::size_t>(it->call)]) calls.steps.push_back({!it->begins, it->call});
  }
  return calls;
}

}  // namespace

IssueList build_issue_list(std::span<const ForwardEvent> events, std::span<const UnitTraits> units, int prefetch) {
  const Calls calls = reverse(events);
  const auto unit_of = [&](int call) { return calls.unit[static_cast<std::size_t>(call)]; };
  const auto traits = [&](int unit) -> const UnitTraits& { return units[static_cast<std::size_t>(unit)]; };

  // First, without prefetch: which calls gather, and what each does when backward leaves it.
  std::vector<char> resident;
  for (const UnitTraits& unit : units) resident.push_back(unit.resident);
  std::vector<int> remaining(units.size(), 0);
  for (const Step& step : calls.steps) remaining[static_cast<std::size_t>(unit_of(step.call))] += step.begins;
  std::vector<char> gathers(calls.unit.size(), 0);
  std::vector<char> reshards(calls.unit.size(), 0);
  std::vector<char> reduces(calls.unit.size(), 0);
  std::vector<int> begin_order;  // calls in the order backward begins them
  for (const Step& step : calls.steps) {
    const int unit = unit_of(step.call);
    const auto u = static_cast<std::size_t>(unit);
    const auto c = static_cast<std::size_t>(step.call);
    if (step.begins) {
      begin_order.push_back(step.call);
      gathers[c] = traits(unit).has_params && !resident[u];
      resident[u] = true;
      continue;
    }
    const bool last = --remaining[u] == 0;
    reduces[c] = last && traits(unit).has_params && traits(unit).reduces;
    reshards[c] = traits(unit).has_params && (last || traits(unit).reshard_after_forward);
    if (reshards[c]) resident[u] = false;
  }

  // Then the list itself. A gather may move up by `prefetch` calls, but never above the reshard of an earlier call
  // of the same unit.
  IssueList list;
  list.pre_backward.assign(calls.unit.size(), 0);
  list.post_backward.assign(calls.unit.size(), 0);
  std::vector<char> issued(calls.unit.size(), 0);
  std::vector<char> occupied;
  for (const UnitTraits& unit : units) occupied.push_back(unit.resident);
  std::size_t begun = 0;
  for (const Step& step : calls.steps) {
    const auto c = static_cast<std::size_t>(step.call);
    if (step.begins) {
      const std::size_t until = std::min(begin_order.size(), begun + static_cast<std::size_t>(prefetch) + 1);
      for (std::size_t i = begun; i < until; ++i) {
        const int call = begin_order[i];
        const auto u = static_cast<std::size_t>(unit_of(call));
        if (!gathers[static_cast<std::size_t>(call)] || issued[static_cast<std::size_t>(call)] || occupied[u]) continue;
        list.issues.push_back({IssueKind::kGather, unit_of(call), call});
        issued[static_cast<std::size_t>(call)] = true;
        occupied[u] = true;
      }
      ++begun;
      list.pre_backward[c] = static_cast<int>(list.issues.size());
      continue;
    }
    const int unit = unit_of(step.call);
    if (step.call == 0) list.tail = static_cast<int>(list.issues.size());  // call 0 is the root's
    if (reduces[c]) list.issues.push_back({IssueKind::kReduce, unit, step.call});
    if (reshards[c]) {
      list.issues.push_back({IssueKind::kReshard, unit, step.call});
      occupied[static_cast<std::size_t>(unit)] = false;
    }
    list.post_backward[c] = static_cast<int>(list.issues.size());
  }
  return list;
}

}  // namespace ragged::fsdp
