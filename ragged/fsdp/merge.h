// Which units go into one collective: pure decisions, alike on all ranks. param_group_merged.cpp carries them out.
//
// [Note: merged collectives]
// On Gloo a collective of a few kilobytes costs its latency and nothing else, and a model of many small units pays it
// three times a unit and step. So units whose image is small are gathered together, in the order in which they will be
// wanted, and reduced together; their bytes are copied into one buffer and out of it. Only what comes next to each
// other merges, so that a merged gather brings images no earlier than the largest merge explains.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "ragged/base/math.h"

namespace ragged::fsdp {

/// What the collective of one unit may go together with.
struct MergeTraits {
  int kind = -1;    // others of the same kind; -1: with nothing
  Index bytes = 0;  // of its image
  friend bool operator==(const MergeTraits&, const MergeTraits&) = default;
};

/// A collective that grows: the first unit, and others of its kind while the sum of bytes stays within a limit.
class MergeRun {
 public:
  MergeRun(MergeTraits first, Index limit);
  /// Whether anything can go along.
  bool grows() const { return kind_ >= 0; }
  /// Whether `next` goes along; then it counts from now on.
  bool take(MergeTraits next);

 private:
  int kind_;
  Index bytes_;
  Index limit_;
};

/// Positions of the units that are gathered with the one at `first`, itself included, ascending. `order` says which
/// unit is wanted when; `needs_gather` by position. Those that need none are passed over, the first one that does and
/// can't go along ends it.
std::vector<std::size_t> merged_gather(
    std::span<const int> order, std::size_t first, std::span<const MergeTraits> units, Index limit,
    const std::function<bool(std::size_t)>& needs_gather);

}  // namespace ragged::fsdp
