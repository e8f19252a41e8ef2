// What moves where when a flat tensor goes from one list of intervals to another (ragged to
// ragged): the counts of an uneven all-to-all.
#pragma once

#include <span>
#include <vector>

#include "ragged/layout/interval.h"

namespace ragged::layout {

/// Elements `interval` of the tensor go from rank `source` to rank `target`.
struct Overlap {
  int source = 0;
  int target = 0;
  Interval interval;
  friend bool operator==(const Overlap&, const Overlap&) = default;
};

/// All non-empty intersections of from[i] with to[j], in ascending order of position. Each list
/// must be ascending and disjoint (empty intervals anywhere). O(n + m).
std::vector<Overlap> overlaps(std::span<const Interval> from, std::span<const Interval> to);

}  // namespace ragged::layout
