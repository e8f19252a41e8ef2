// The order of collectives in backward, as a pure function of what forward ran.
//
// [Note: issue list]
// Collective order must never depend on data, or ranks that take different branches wait for each other for ever.
// So hooks issue nothing themselves. Forward records one event pair a unit call; reversed, it says when backward
// will want each unit and be done with it. From that comes a total list of gathers, reductions and reshards, with
// gathers moved up by the prefetch depth: AG n, AG n-1, RS n, AG n-2, ... Hooks only move a cursor: everything up
// to their entry is issued, in order, whether this rank used it or not, and the sweep at the end of backward moves
// the cursor to the end. Every rank that ran the same unit calls in forward issues the same sequence.
// Where several units go into one collective (merge.h), their gathers come together at the first one's place, and their
// reductions wait for the last one's.
//
// [Note: what lies behind the inner units]
// A unit with units inside is reduced at the end of its backward, which begins before theirs: meanwhile the head's
// gradient would lie there whole. So what it holds behind its last inner unit may be a bucket of its own
// (ParamGroup::is_behind), which is reduced when backward enters the first of them. Should a gradient come after all
// (the head is tied to something before), ranks learn so from the used-flags that they exchange at the end, reduce what
// came, and leave the bucket to the end from then on.
#pragma once

#include <span>
#include <vector>

#include "ragged/fsdp/merge.h"

namespace ragged::fsdp {

/// Unit `unit` began (is_begin) or ended its forward. Properly nested, the pair of one unit (the root's) outermost.
struct ForwardEvent {
  bool is_begin = true;
  int unit = 0;
  /// False when nothing in it can need a gradient (all frozen, inputs without grad): it is left out of the list.
  bool needs_backward = true;
  friend bool operator==(const ForwardEvent&, const ForwardEvent&) = default;
};

struct UnitTraits {
  bool has_params = true;
  bool reduces = true;                // has trainable parameters
  bool reshard_after_forward = true;  // so that its calls gather again in backward
  bool reshard_after_backward = true;
  bool gathers_in_backward = true;  // false: backward needs no values of its parameters (an embedding's)
  bool resident = false;            // its image is there when backward begins
  bool reduces_behind = false;      // see [Note: what lies behind the inner units]
  std::vector<int> prefetch{};      // units whose gathers come with its own, instead of the next `prefetch` ones
  MergeTraits gather{};
  MergeTraits reduction{};
};

enum class IssueKind { kGather, kReduce, kReduceBehind, kReshard };

struct Issue {
  IssueKind kind = IssueKind::kGather;
  int unit = 0;
  int call = 0;  // index of the unit call in forward order
  /// The next entry of this kind goes into the same collective. Of gathers that one comes next in the list.
  bool with_next = false;
  friend bool operator==(const Issue&, const Issue&) = default;
};

struct IssueList {
  std::vector<Issue> issues;
  /// By call: how far the cursor must be when backward reaches the call, and when it leaves it.
  std::vector<int> pre_backward;
  std::vector<int> post_backward;
  /// Where the entries of the outermost call's end begin: everything before belongs to what it called.
  int tail = 0;
};

/// Backward enters or leaves a unit call, in the order in which it will.
struct BackwardStep {
  bool begins = true;
  int call = 0;
  int unit = 0;
};

/// Forward's events the other way round, less what needs no backward.
std::vector<BackwardStep> backward_steps(std::span<const ForwardEvent> events);

/// A unit called several times reduces once, after the call that backward reaches last. `merge_bytes`: what a merged
/// collective may move at most; 0: every unit goes by itself. What lies in the tail does in any case.
IssueList build_issue_list(
    std::span<const ForwardEvent> events, std::span<const UnitTraits> units, int prefetch, Index merge_bytes = 0);

}  // namespace ragged::fsdp
