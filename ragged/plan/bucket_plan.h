// The layout of one communication bucket, as a value: who owns which elements, where each parameter
// starts. The planner makes it, the buffer executes it exactly. Offsets count elements and hold for
// every dtype: one plan serves fp32 masters, bf16 images and fp32 gradients.
//
// [Note: image, segments, shard]
// The *image* is the unsharded bucket: segments one after another, each holding whole parameters
// with padding only between them. In a *uniform* segment (m ranks, shard size S) rank k owns the
// k-th S elements: one all-gather, one reduce-scatter. In a *ragged* segment there is no padding
// but what aligns a start (or the next segment), and each rank owns any one interval, in any order
// of ranks as long as a parameter's owners ascend. An *opaque* segment has the rules of a ragged
// one, padding allowed. So a rank's part of the image is one range a segment, and its flat *shard*
// is their concatenation. Trainable segments come first: gradients use the same offsets over that
// prefix. Parameters without elements take no room, and a segment of nothing else has a shard size
// of 0.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ragged/layout/interval.h"
#include "ragged/layout/placement.h"

namespace ragged::plan {

using layout::Interval;
using layout::SegmentRange;

/// A parameter as the planner sees it. `block` and `restart` as in BlockExtent (plan/block.h).
struct ParamSpec {
  std::string name{};
  std::vector<Index> shape{};
  Index block = 1;
  Index restart = 0;
  bool trainable = true;

  Index numel() const { return checked_product(shape); }
  friend bool operator==(const ParamSpec&, const ParamSpec&) = default;
};

enum class SegmentKind { kUniform, kRagged, kOpaque };

/// "uniform", "ragged" or "opaque".
std::string_view to_string(SegmentKind kind);

struct Segment {
  SegmentKind kind = SegmentKind::kUniform;
  Index image_offset = 0;
  Index numel = 0;                 // of the image; m * shard_size when uniform
  Index shard_size = 0;            // S when uniform, else 0
  bool trainable = true;           // false: no reduce buffer unless a parameter is unfrozen
  std::vector<Interval> owners{};  // rank -> its interval of the image (absolute); possibly empty
  std::vector<int> params{};       // indices into BucketPlan::params, ascending in position

  friend bool operator==(const Segment&, const Segment&) = default;
};

struct BucketPlan {
  static constexpr int kFormat = 1;  // of the JSON form

  int world_size = 1;
  Index collective_unit = 1;        // S is a multiple of it
  Index start_alignment = 1;        // parameters start on multiples of it
  std::vector<ParamSpec> params{};  // in module order
  std::vector<Index> starts{};      // params[i] occupies image [starts[i], starts[i] + numel)
  std::vector<Segment> segments{};
  // No layout of equal shards, trainable and frozen apart, can have a smaller image, in elements.
  Index lower_bound = 0;

  // The functions below presume a plan that validate() accepts. They throw InvalidArgument for a
  // rank, parameter or number of segments out of range.
  Index image_numel() const;
  /// Image elements of the first `num_segments` segments.
  Index image_numel(int num_segments) const;
  int num_trainable_segments() const;
  /// Image elements that belong to no parameter.
  Index padding() const;

  /// One range a segment (see the note above).
  std::vector<SegmentRange> ranges(int rank) const;
  Index local_numel(int rank) const;
  Index local_numel(int rank, int num_segments) const;

  /// Index of the segment that holds parameter i.
  int segment_of(int param) const;
  Interval image_interval(int param) const;
  /// The part of parameter i that `rank` owns, in elements of the parameter; {0, 0} when none.
  Interval owned(int param, int rank) const;
  /// Where that part starts in the rank's shard (where it would start, when empty).
  Index local_offset(int param, int rank) const;
  layout::RaggedShard placement(int param) const;
  /// Intervals of the image that hold padding, ascending.
  std::vector<Interval> gaps() const;

  friend bool operator==(const BucketPlan&, const BucketPlan&) = default;
};

/// Throws InvalidArgument, saying what is wrong, unless the plan satisfies every invariant of the
/// note: owners disjoint, in range and (uniform) equal; parameters whole, disjoint, aligned, in one
/// segment; no border in a block; S a multiple of the unit. Shares no code with the planner.
void validate(const BucketPlan& plan);

/// Order-independent of rank and process: equal plans have equal hashes on every machine.
std::uint64_t hash(const BucketPlan& plan);

/// One line a segment and a parameter, for people.
std::string to_string(const BucketPlan& plan);

}  // namespace ragged::plan
