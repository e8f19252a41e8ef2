// A flat interval of an n-D tensor as n-D boxes, and boxes against boxes: the one piece of index
// mathematics behind saving, loading and redistribution.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "ragged/layout/interval.h"

namespace ragged::layout {

/// offset[i] <= x[i] < offset[i] + size[i]. Same rank as the tensor; a 0-dim tensor has one box of
/// no dims.
struct Box {
  std::vector<Index> offset;
  std::vector<Index> size;

  Index numel() const { return checked_product(size); }
  friend bool operator==(const Box&, const Box&) = default;
};

/// The interval as at most 2n-1 non-empty boxes in ascending order, each contiguous in row-major
/// storage, so box k's elements follow those of box k-1 in a flat buffer that holds the interval.
/// Empty for an empty interval. Example: shape (3, 4), [2, 9): (0,2)+(1,2), (1,0)+(1,4),
/// (2,0)+(1,1).
std::vector<Box> boxes(std::span<const Index> shape, Interval interval);

/// Common part of two boxes of equal rank; none when it is empty.
std::optional<Box> intersect(const Box& a, const Box& b);

/// The flat interval that a box made by boxes() covers. Throws InvalidArgument for a box that isn't
/// contiguous.
Interval flat_interval(std::span<const Index> shape, const Box& box);

}  // namespace ragged::layout
