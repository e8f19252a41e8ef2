// What makes a bucket plan legal, checked from the plan alone. Shares no code with the planner or
// with the plan's own arithmetic, so that a slip there shows here. Plans may come from a file:
// nothing is added up before it is in range.
#include <algorithm>
#include <limits>
#include <string_view>

#include <fmt/format.h>

#include "ragged/plan/bucket_plan.h"

namespace ragged::plan {
namespace {

struct OwnedPart {
  Interval interval;
  int rank = 0;
};

class Validator {
 public:
  explicit Validator(const BucketPlan& plan) : plan_(plan) {}

  void run() {
    check_numbers();
    check_params();
    check_segment_order();
    for (std::size_t i = 0; i < plan_.segments.size(); ++i) {
      check_size(i);
      check_owners(i);
      check_starts(i);
      check_borders(i);
    }
    check_all_placed();
    check_bound();
  }

 private:
  void check_numbers() const {
    RAGGED_CHECK(
        plan_.world_size >= 1, "[validate] Expected a world size of at least 1, but got {}.", plan_.world_size);
    RAGGED_CHECK(
        plan_.collective_unit >= 1, "[validate] Expected a collective unit of at least 1, but got {}.",
        plan_.collective_unit);
    RAGGED_CHECK(
        plan_.start_alignment >= 1 && plan_.collective_unit % plan_.start_alignment == 0,
        "[validate] Expected a start alignment that divides the collective unit {}, but got {}.", plan_.collective_unit,
        plan_.start_alignment);
    RAGGED_CHECK(
        plan_.starts.size() == plan_.params.size(), "[validate] Expected {} starts, one a parameter, but got {}.",
        plan_.params.size(), plan_.starts.size());
  }

  void check_params() {
    for (const ParamSpec& param : plan_.params) {
      for (Index size : param.shape) {
        RAGGED_CHECK(size >= 0, "[validate] Expected sizes >= 0, but got {} (param '{}').", size, param.name);
      }
      const Index numel = param.numel();
      numels_.push_back(numel);
      RAGGED_CHECK(
          param.block >= 1 && (numel == 0 || param.block <= numel),
          "[validate] Expected a block of 1 to {} elements, but got {} (param '{}').", std::max<Index>(numel, 1),
          param.block, param.name);
      RAGGED_CHECK(
          param.restart == 0 || param.restart >= param.block,
          "[validate] Expected a restart of 0 or at least the block {}, but got {} (param '{}').", param.block,
          param.restart, param.name);
    }
    homes_.assign(plan_.params.size(), -1);
  }

  void check_segment_order() const {
    Index offset = 0;
    bool was_frozen = false;
    for (std::size_t i = 0; i < plan_.segments.size(); ++i) {
      const Segment& segment = plan_.segments[i];
      RAGGED_CHECK(
          segment.image_offset == offset, "[validate] Expected segment {} at {}, but got {}.", i, offset,
          segment.image_offset);
      RAGGED_CHECK(
          segment.numel >= 0 && segment.numel <= std::numeric_limits<Index>::max() - offset,
          "[validate] Expected segments of 0 to 2^63 elements, but got {} (segment {}).", segment.numel, i);
      offset += segment.numel;
      RAGGED_CHECK(
          !(was_frozen && segment.trainable),
          "[validate] Expected trainable segments first, but got segment {} after a frozen one.", i);
      was_frozen = !segment.trainable;
    }
  }

  void check_size(std::size_t index) const {
    const Segment& segment = plan_.segments[index];
    if (segment.kind != SegmentKind::kUniform) {
      RAGGED_CHECK(
          segment.shard_size == 0,
          "[validate] Expected a shard size of 0 in a segment that isn't uniform, but got {} "
          "(segment {}).",
          segment.shard_size, index);
      return;
    }
    RAGGED_CHECK(
        segment.shard_size >= 0 && segment.shard_size % plan_.collective_unit == 0,
        "[validate] Expected a shard size that is a multiple of the collective unit {}, but got {} "
        "(segment {}).",
        plan_.collective_unit, segment.shard_size, index);
    RAGGED_CHECK(
        segment.shard_size == segment.numel / plan_.world_size && segment.numel % plan_.world_size == 0,
        "[validate] Expected {} ranks' equal shards of {}, but got {} elements (segment {}).", plan_.world_size,
        segment.shard_size, segment.numel, index);
  }

  void check_owners(std::size_t index) {
    const Segment& segment = plan_.segments[index];
    const Interval extent{segment.image_offset, segment.image_offset + segment.numel};
    RAGGED_CHECK(
        segment.owners.size() == static_cast<std::size_t>(plan_.world_size),
        "[validate] Expected {} owners, one a rank, but got {} (segment {}).", plan_.world_size, segment.owners.size(),
        index);
    parts_.clear();
    for (int rank = 0; rank < plan_.world_size; ++rank) {
      const Interval own = segment.owners[static_cast<std::size_t>(rank)];
      const std::string place = fmt::format("(segment {}, rank {} of {})", index, rank, plan_.world_size);
      if (segment.kind == SegmentKind::kUniform) {
        const Index begin = extent.begin + rank * segment.shard_size;
        RAGGED_CHECK(
            own.begin == begin && own.end == begin + segment.shard_size,
            "[validate] Expected the uniform shard [{}, {}), but got [{}, {}) {}.", begin, begin + segment.shard_size,
            own.begin, own.end, place);
      }
      if (own.begin == own.end) {
        RAGGED_CHECK(
            own.begin >= 0 && own.begin <= extent.end,
            "[validate] Expected an empty interval within the image, but got one at {} {}.", own.begin, place);
        continue;
      }
      RAGGED_CHECK(
          extent.begin <= own.begin && own.begin < own.end && own.end <= extent.end,
          "[validate] Expected an interval within [{}, {}), but got [{}, {}) {}.", extent.begin, extent.end, own.begin,
          own.end, place);
      parts_.push_back({own, rank});
    }
    std::sort(parts_.begin(), parts_.end(), [](const OwnedPart& a, const OwnedPart& b) {
      return a.interval.begin < b.interval.begin;
    });
    for (std::size_t i = 1; i < parts_.size(); ++i) {
      RAGGED_CHECK(
          parts_[i - 1].interval.end <= parts_[i].interval.begin,
          "[validate] Expected owners that don't overlap, but got ranks {} and {} both owning {} "
          "(segment {}).",
          parts_[i - 1].rank, parts_[i].rank, parts_[i].interval.begin, index);
    }
  }

  void check_starts(std::size_t index) {
    const Segment& segment = plan_.segments[index];
    const Index end = segment.image_offset + segment.numel;
    Index cursor = segment.image_offset;
    for (int i : segment.params) {
      RAGGED_CHECK(
          i >= 0 && static_cast<std::size_t>(i) < plan_.params.size(),
          "[validate] Expected parameters in [0, {}), but got {} (segment {}).", plan_.params.size(), i, index);
      const std::size_t param = static_cast<std::size_t>(i);
      const std::string& name = plan_.params[param].name;
      const Index start = plan_.starts[param];
      RAGGED_CHECK(
          homes_[param] == -1,
          "[validate] Expected every parameter in one place, but got segments {} and {} (param "
          "'{}').",
          homes_[param], index, name);
      homes_[param] = static_cast<int>(index);
      RAGGED_CHECK(
          plan_.params[param].trainable == segment.trainable,
          "[validate] Expected trainable and frozen parameters apart, but got both in segment {} "
          "(param '{}').",
          index, name);
      RAGGED_CHECK(
          start >= cursor && start <= end && numels_[param] <= end - start,
          "[validate] Expected {} elements between {} and {}, but got a start of {} (segment {}, "
          "param '{}').",
          numels_[param], cursor, end, start, index, name);
      RAGGED_CHECK(
          numels_[param] == 0 || start % plan_.start_alignment == 0,
          "[validate] Expected a start that is a multiple of {}, but got {} (param '{}').", plan_.start_alignment,
          start, name);
      check_no_padding(segment, start - cursor, name);
      cursor = start + numels_[param];
    }
    // Room at the end may bring the next segment to a multiple of the unit.
    RAGGED_CHECK(
        segment.kind != SegmentKind::kRagged || end - cursor < plan_.collective_unit,
        "[validate] Expected no padding in a ragged segment, but got {} elements at its end "
        "(segment {}).",
        end - cursor, index);
  }

  void check_no_padding(const Segment& segment, Index padding, std::string_view name) const {
    RAGGED_CHECK(
        segment.kind != SegmentKind::kRagged || padding < plan_.start_alignment,
        "[validate] Expected no padding in a ragged segment but for alignment, but got {} elements "
        "(param '{}').",
        padding, name);
  }

  // Every element has an owner, owners ascend, and where one hands over to the next a block ends.
  void check_borders(std::size_t index) const {
    for (int i : plan_.segments[index].params) {
      const std::size_t param = static_cast<std::size_t>(i);
      const ParamSpec& spec = plan_.params[param];
      const Index start = plan_.starts[param];
      const Index end = start + numels_[param];
      if (start == end) continue;
      auto part = std::upper_bound(parts_.begin(), parts_.end(), start, [](Index position, const OwnedPart& p) {
        return position < p.interval.end;
      });
      Index cursor = start;
      int previous = -1;
      while (cursor < end) {
        RAGGED_CHECK(
            part != parts_.end() && part->interval.begin <= cursor,
            "[validate] Expected an owner for every element, but got none for element {} (param "
            "'{}').",
            cursor - start, spec.name);
        RAGGED_CHECK(
            part->rank > previous,
            "[validate] Expected owners in ascending order, but got rank {} after {} (param '{}').", part->rank,
            previous, spec.name);
        check_border(spec, cursor - start);
        previous = part->rank;
        cursor = part->interval.end;
        ++part;
      }
    }
  }

  static void check_border(const ParamSpec& spec, Index position) {
    const Index in_run = spec.restart > 0 ? position % spec.restart : position;
    RAGGED_CHECK(
        in_run % spec.block == 0,
        "[validate] Expected no border inside a block of {}, but got one at element {} (param "
        "'{}').",
        spec.block, position, spec.name);
  }

  void check_all_placed() const {
    for (std::size_t i = 0; i < homes_.size(); ++i) {
      RAGGED_CHECK(
          homes_[i] != -1, "[validate] Expected every parameter in a segment, but got none (param '{}').",
          plan_.params[i].name);
    }
  }

  void check_bound() const {
    bool is_uniform = true;
    Index numel = 0;
    for (const Segment& segment : plan_.segments) {
      is_uniform = is_uniform && segment.kind == SegmentKind::kUniform;
      numel += segment.numel;
    }
    // The bound speaks of equal shards, so other segments may pass below it.
    RAGGED_CHECK(
        plan_.lower_bound >= 0 && (!is_uniform || plan_.lower_bound <= numel),
        "[validate] Expected a lower bound of 0 to {}, but got {}.", numel, plan_.lower_bound);
  }

  const BucketPlan& plan_;
  std::vector<Index> numels_;
  std::vector<int> homes_;        // parameter -> its segment
  std::vector<OwnedPart> parts_;  // of the segment at hand, ascending, non-empty
};

}  // namespace

void validate(const BucketPlan& plan) {
  Validator(plan).run();
}

}  // namespace ragged::plan
