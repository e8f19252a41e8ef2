#include "ragged/layout/overlap.h"

#include <string_view>

namespace ragged::layout {
namespace {

void check_ascending(std::span<const Interval> intervals, std::string_view side) {
  bool has_previous = false;
  Index previous_end = 0;
  for (std::size_t rank = 0; rank < intervals.size(); ++rank) {
    if (intervals[rank].empty()) continue;
    RAGGED_CHECK(
        !has_previous || intervals[rank].begin >= previous_end,
        "[overlaps] Expected ascending, disjoint intervals in '{}', but got [{}, {}) on rank {} "
        "after an interval that ends at {}.",
        side, intervals[rank].begin, intervals[rank].end, rank, previous_end);
    has_previous = true;
    previous_end = intervals[rank].end;
  }
}

}  // namespace

std::vector<Overlap> overlaps(std::span<const Interval> from, std::span<const Interval> to) {
  check_ascending(from, "from");
  check_ascending(to, "to");
  std::vector<Overlap> result;
  std::size_t source = 0;
  std::size_t target = 0;
  while (source < from.size() && target < to.size()) {
    // An empty interval may lie anywhere, so its end says nothing about the order: step over it
    // first.
    if (from[source].empty()) {
      ++source;
      continue;
    }
    if (to[target].empty()) {
      ++target;
      continue;
    }
    const Interval common = intersect(from[source], to[target]);
    if (!common.empty()) {
      result.push_back({static_cast<int>(source), static_cast<int>(target), common});
    }
    if (from[source].end <= to[target].end) {
      ++source;
    } else {
      ++target;
    }
  }
  return result;
}

}  // namespace ragged::layout
