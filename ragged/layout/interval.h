// Half-open ranges of flat element positions: what every layout is made of.
#pragma once

#include <algorithm>
#include <compare>

#include "ragged/base/math.h"

namespace ragged::layout {

/// [begin, end) in elements. Empty when begin >= end.
struct Interval {
  Index begin = 0;
  Index end = 0;

  constexpr Index size() const { return std::max<Index>(0, end - begin); }
  constexpr bool empty() const { return end <= begin; }
  constexpr bool contains(Index position) const { return begin <= position && position < end; }
  constexpr Interval shifted(Index by) const { return {begin + by, end + by}; }
  friend constexpr bool operator==(const Interval&, const Interval&) = default;
};

/// The common part; {0, 0} when there is none, so that all empty intersections are equal.
constexpr Interval intersect(Interval a, Interval b) {
  const Interval both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.empty() ? Interval{} : both;
}

/// One rank's part of one segment: `length` elements at `image_offset` in the bucket's unsharded
/// image lie at `local_offset` in the rank's flat shard. A rank has exactly one a segment (length
/// may be 0), and its shard is their concatenation in segment order.
struct SegmentRange {
  Index image_offset = 0;
  Index local_offset = 0;
  Index length = 0;

  friend constexpr bool operator==(const SegmentRange&, const SegmentRange&) = default;
};

}  // namespace ragged::layout
