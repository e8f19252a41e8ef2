// The arithmetic of a plan, its hash and its printed form. What makes a plan legal is in
// validate.cpp.
#include "ragged/plan/bucket_plan.h"

#include <algorithm>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace ragged::plan {
namespace {

std::size_t at(Index i) {
  return static_cast<std::size_t>(i);
}

void check_rank(const BucketPlan& plan, int rank) {
  RAGGED_CHECK(
      rank >= 0 && rank < plan.world_size, "[plan] Expected a rank in [0, {}), but got {}.", plan.world_size, rank);
}

void check_param(const BucketPlan& plan, int param) {
  RAGGED_CHECK(
      param >= 0 && at(param) < plan.params.size(), "[plan] Expected a parameter in [0, {}), but got {}.",
      plan.params.size(), param);
}

void check_num_segments(const BucketPlan& plan, int num_segments) {
  RAGGED_CHECK(
      num_segments >= 0 && at(num_segments) <= plan.segments.size(), "[plan] Expected at most {} segments, but got {}.",
      plan.segments.size(), num_segments);
}

Interval relative(Interval part, Index start) {
  return part.empty() ? Interval{} : part.shifted(-start);
}

// FNV-1a over little-endian words: the same number on every machine, unlike std::hash.
class StableHash {
 public:
  void add(Index value) {
    auto bits = static_cast<std::uint64_t>(value);
    for (int byte = 0; byte < 8; ++byte) {
      add_byte(bits & 0xff);
      bits >>= 8;
    }
  }
  void add(std::string_view text) {
    add(static_cast<Index>(text.size()));
    for (char c : text) add_byte(static_cast<unsigned char>(c));
  }
  template <class T>
  void add_all(const std::vector<T>& values) {
    add(static_cast<Index>(values.size()));
    for (const T& value : values) add(value);
  }
  void add(Interval interval) {
    add(interval.begin);
    add(interval.end);
  }
  std::uint64_t value() const { return state_; }

 private:
  void add_byte(std::uint64_t byte) { state_ = (state_ ^ byte) * 0x100000001b3ULL; }

  std::uint64_t state_ = 0xcbf29ce484222325ULL;
};

}  // namespace

std::string_view to_string(SegmentKind kind) {
  switch (kind) {
    case SegmentKind::kUniform:
      return "uniform";
    case SegmentKind::kRagged:
      return "ragged";
    case SegmentKind::kOpaque:
      return "opaque";
  }
  return "unknown";
}

Index BucketPlan::image_numel() const {
  return image_numel(static_cast<int>(segments.size()));
}

Index BucketPlan::image_numel(int num_segments) const {
  check_num_segments(*this, num_segments);
  Index sum = 0;
  for (int i = 0; i < num_segments; ++i) sum += segments[at(i)].numel;
  return sum;
}

int BucketPlan::num_trainable_segments() const {
  return static_cast<int>(
      std::count_if(segments.begin(), segments.end(), [](const Segment& segment) { return segment.trainable; }));
}

Index BucketPlan::padding() const {
  Index sum = image_numel();
  for (const ParamSpec& param : params) sum -= param.numel();
  return sum;
}

std::vector<SegmentRange> BucketPlan::ranges(int rank) const {
  check_rank(*this, rank);
  std::vector<SegmentRange> result;
  result.reserve(segments.size());
  Index local_offset = 0;
  for (const Segment& segment : segments) {
    const Interval own = segment.owners[at(rank)];
    result.push_back({own.begin, local_offset, own.size()});
    local_offset += own.size();
  }
  return result;
}

Index BucketPlan::local_numel(int rank) const {
  return local_numel(rank, static_cast<int>(segments.size()));
}

Index BucketPlan::local_numel(int rank, int num_segments) const {
  check_rank(*this, rank);
  check_num_segments(*this, num_segments);
  Index sum = 0;
  for (int i = 0; i < num_segments; ++i) sum += segments[at(i)].owners[at(rank)].size();
  return sum;
}

int BucketPlan::segment_of(int param) const {
  check_param(*this, param);
  // A segment's parameters ascend in position, so only those that share a start (empty ones) need a
  // look.
  const auto start_of = [&](int i) { return starts[at(i)]; };
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const auto same_start = std::ranges::equal_range(segments[i].params, starts[at(param)], {}, start_of);
    if (std::ranges::find(same_start, param) != same_start.end()) return static_cast<int>(i);
  }
  RAGGED_CHECK(
      false, "[plan] Expected every parameter in a segment, but got none that holds it (param '{}').",
      params[at(param)].name);
  return -1;
}

Interval BucketPlan::image_interval(int param) const {
  check_param(*this, param);
  return {starts[at(param)], starts[at(param)] + params[at(param)].numel()};
}

Interval BucketPlan::owned(int param, int rank) const {
  check_rank(*this, rank);
  const Segment& segment = segments[at(segment_of(param))];
  const Interval whole = image_interval(param);
  return relative(intersect(whole, segment.owners[at(rank)]), whole.begin);
}

Index BucketPlan::local_offset(int param, int rank) const {
  check_rank(*this, rank);
  const int segment = segment_of(param);
  const Interval own = segments[at(segment)].owners[at(rank)];
  const Index within = std::clamp(starts[at(param)], own.begin, own.end) - own.begin;
  return local_numel(rank, segment) + within;
}

layout::RaggedShard BucketPlan::placement(int param) const {
  const Segment& segment = segments[at(segment_of(param))];
  const Interval whole = image_interval(param);
  std::vector<Interval> by_rank;
  by_rank.reserve(segment.owners.size());
  for (const Interval& own : segment.owners) {
    by_rank.push_back(relative(intersect(whole, own), whole.begin));
  }
  return layout::ragged_from_intervals(params[at(param)].shape, by_rank);
}

std::vector<Interval> BucketPlan::gaps() const {
  std::vector<Interval> result;
  Index cursor = 0;
  for (const Segment& segment : segments) {
    for (int param : segment.params) {
      const Interval whole = image_interval(param);
      if (whole.empty()) continue;
      if (cursor < whole.begin) result.push_back({cursor, whole.begin});
      cursor = whole.end;
    }
  }
  const Index end = image_numel();
  if (cursor < end) result.push_back({cursor, end});
  return result;
}

std::uint64_t hash(const BucketPlan& plan) {
  StableHash hash;
  hash.add(plan.world_size);
  hash.add(plan.collective_unit);
  hash.add(plan.start_alignment);
  hash.add(plan.lower_bound);
  hash.add(static_cast<Index>(plan.params.size()));
  for (const ParamSpec& param : plan.params) {
    hash.add(param.name);
    hash.add_all(param.shape);
    hash.add(param.block);
    hash.add(param.restart);
    hash.add(param.trainable ? 1 : 0);
  }
  hash.add_all(plan.starts);
  hash.add(static_cast<Index>(plan.segments.size()));
  for (const Segment& segment : plan.segments) {
    hash.add(static_cast<Index>(segment.kind));
    hash.add(segment.image_offset);
    hash.add(segment.numel);
    hash.add(segment.shard_size);
    hash.add(segment.trainable ? 1 : 0);
    hash.add_all(segment.owners);
    hash.add_all(segment.params);
  }
  return hash.value();
}

std::string to_string(const BucketPlan& plan) {
  std::string text = fmt::format(
      "plan for {} ranks: {} parameters, {} segments, image {} elements ({} padding, lower bound "
      "{})\n",
      plan.world_size, plan.params.size(), plan.segments.size(), plan.image_numel(), plan.padding(), plan.lower_bound);
  for (const Segment& segment : plan.segments) {
    text += fmt::format(
        "{} {} segment [{}, {}), shard {}\n", segment.trainable ? "trainable" : "frozen", to_string(segment.kind),
        segment.image_offset, segment.image_offset + segment.numel, segment.shard_size);
    for (int i : segment.params) {
      const ParamSpec& param = plan.params[at(i)];
      const Interval whole = plan.image_interval(i);
      text += fmt::format(
          "  {} [{}] at [{}, {}), block {}{}\n", param.name, fmt::join(param.shape, ", "), whole.begin, whole.end,
          param.block, param.restart > 0 ? fmt::format(" anew every {}", param.restart) : "");
    }
  }
  return text;
}

}  // namespace ragged::plan
