// What one forward under grad mode ran, and how far backward has come through it.
#pragma once

#include <memory>
#include <vector>

#include "ragged/fsdp/issue_list.h"

namespace ragged::fsdp {

/// Shared by the hooks on the graph it describes; gone with the graph. Several may be open at once (pipelining, two
/// forwards before a backward), and a second backward over a kept graph works the same one again.
struct ForwardRecord {
  int id = 0;
  std::vector<ForwardEvent> events;
  std::vector<int> call_units;           // by call
  std::vector<std::size_t> call_events;  // by call: where it begins in events

  // Of the backward that is running over it.
  IssueList list;
  int cursor = 0;
  std::vector<char> reached;  // by call: its pre-backward ran
  std::vector<char> left;     // by call: gradients have reached its inputs

  int begin_call(int unit, bool needs_backward) {
    call_events.push_back(events.size());
    events.push_back({true, unit, needs_backward});
    call_units.push_back(unit);
    return static_cast<int>(call_units.size()) - 1;
  }
  void end_call(int unit) { events.push_back({false, unit, true}); }
  /// The call failed: backward won't come through it.
  void drop_call(int call) { events[call_events[static_cast<std::size_t>(call)]].needs_backward = false; }
};

}  // namespace ragged::fsdp
