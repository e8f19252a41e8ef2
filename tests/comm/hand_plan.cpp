#include "tests/comm/hand_plan.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace ragged::test {
namespace {

using plan::Interval;
using plan::Segment;
using plan::SegmentKind;

constexpr int kK = 0;
constexpr int kQ = 1;
constexpr int kW = 2;
constexpr int kB = 3;
constexpr int kV = 4;

std::size_t at(Index i) {
  return static_cast<std::size_t>(i);
}

Index round_up(Index value, Index unit) {
  return (value + unit - 1) / unit * unit;
}

Segment uniform_segment(int world_size, Index offset, Index shard_size) {
  Segment segment;
  segment.image_offset = offset;
  segment.numel = world_size * shard_size;
  segment.shard_size = shard_size;
  for (int r = 0; r < world_size; ++r) {
    segment.owners.push_back({offset + r * shard_size, offset + (r + 1) * shard_size});
  }
  return segment;
}

}  // namespace

plan::BucketPlan make_hand_plan(const HandPlan& spec) {
  plan::BucketPlan plan;
  plan.world_size = spec.world_size;
  plan.start_alignment = spec.start_alignment;
  plan.collective_unit = spec.start_alignment;
  plan.starts.assign(5, 0);
  plan.params = {{.name = "k"}, {.name = "q"}, {.name = "w"}, {.name = "b"}, {.name = "v"}};
  // Puts a parameter into [begin, end), or as much of it as alignment leaves.
  const auto place = [&](int param, Index begin, Index end) {
    const Index start = std::min(round_up(begin, spec.start_alignment), end);
    plan.starts[at(param)] = start;
    const Index numel = end - start;
    plan.params[at(param)].shape = numel % 2 == 0 ? std::vector<Index>{numel / 2, 2} : std::vector<Index>{numel};
    return end;
  };

  Segment first = uniform_segment(spec.world_size, 0, round_up(spec.first_shard, spec.start_alignment));
  const Index half = first.numel / 2;
  place(kW, 0, half);
  place(kB, std::min(half + 1, first.numel), first.numel);
  first.params = {kW, kB};

  Segment second = uniform_segment(spec.world_size, first.numel, round_up(spec.second_shard, spec.start_alignment));
  place(kV, first.numel, first.numel + std::max<Index>(0, second.numel - 1));
  second.params = {kV};

  Segment ragged;
  ragged.kind = SegmentKind::kRagged;
  ragged.image_offset = first.numel + second.numel;
  ragged.trainable = !spec.frozen_ragged;
  ragged.owners.assign(at(spec.world_size), {ragged.image_offset, ragged.image_offset});
  ragged.params = {kK, kQ};
  const int split = spec.first_owner == 0 ? (spec.world_size + 1) / 2 : spec.world_size - spec.first_owner;
  Index cursor = ragged.image_offset;
  for (const auto& [param, from, to] : {std::tuple{kK, 0, split}, std::tuple{kQ, split, spec.world_size}}) {
    Index numel = 0;
    for (int i = from; i < to; ++i) numel += spec.ragged[at(i)];
    if (numel > 0) cursor = round_up(cursor, spec.start_alignment);
    place(param, cursor, cursor + numel);
    for (int i = from; i < to; ++i) {
      const Interval owned{cursor, cursor + spec.ragged[at(i)]};
      if (!owned.empty()) ragged.owners[at((i + spec.first_owner) % spec.world_size)] = owned;
      cursor = owned.end;
    }
  }
  ragged.numel = cursor - ragged.image_offset;
  for (int param : {kK, kQ}) plan.params[at(param)].trainable = ragged.trainable;

  plan.segments = {first, second, ragged};
  plan::validate(plan);
  return plan;
}

std::vector<HandPlan> awkward_plans(int world_size, const std::vector<Index>& shard_sizes) {
  std::vector<HandPlan> plans;
  const std::vector<Index> unequal{5, 0, 3, 1, 0, 7, 2};
  for (std::size_t i = 0; i < shard_sizes.size(); ++i) {
    HandPlan spec;
    spec.world_size = world_size;
    spec.first_shard = shard_sizes[i];
    spec.second_shard = shard_sizes[(i + 1) % shard_sizes.size()];
    spec.first_owner = static_cast<int>(i) % world_size;
    for (int r = 0; r < world_size; ++r) {
      spec.ragged.push_back(unequal[(at(r) + i) % unequal.size()] + (r == 1 ? shard_sizes[i] : 0));
    }
    plans.push_back(spec);
  }
  // Aligned starts leave padding between owners: within an ascending run of ranks, and where the run ends.
  for (const int first_owner : {0, 1}) {
    HandPlan aligned = plans.back();
    aligned.start_alignment = 4;
    aligned.first_owner = first_owner % world_size;
    plans.push_back(aligned);
  }
  // Nobody owns any of the ragged segment, and a single rank owns all of it.
  HandPlan nothing{.world_size = world_size, .first_shard = 3, .second_shard = 0};
  nothing.ragged.assign(at(world_size), 0);
  plans.push_back(nothing);
  HandPlan single = nothing;
  single.ragged.back() = 13;
  single.first_owner = world_size / 2;
  plans.push_back(single);
  return plans;
}

std::string to_string(const HandPlan& spec) {
  return fmt::format(
      "world {} shards {} and {} ragged {} from rank {} aligned {}", spec.world_size, spec.first_shard,
      spec.second_shard, fmt::join(spec.ragged, ","), spec.first_owner, spec.start_alignment);
}

}  // namespace ragged::test
