#include "tests/plan/plans.h"

#include <fstream>
#include <iterator>
#include <map>

#include <gtest/gtest.h>

namespace ragged::testing {
namespace {

using plan::BucketPlan;
using plan::Interval;
using plan::ParamSpec;
using plan::PlanOptions;
using plan::Segment;
using plan::SegmentKind;
using plan::SegmentRange;

std::size_t at(Index i) {
  return static_cast<std::size_t>(i);
}

constexpr int kNobody = -1;

// For every image element, the rank that owns it and where in its shard, read from ranges() alone.
struct Walk {
  explicit Walk(const BucketPlan& plan)
      : owner(at(plan.image_numel()), kNobody),
        local(at(plan.image_numel()), -1),
        param(at(plan.image_numel()), kNobody) {
    for (int rank = 0; rank < plan.world_size; ++rank) {
      Index cursor = 0;
      for (const SegmentRange& range : plan.ranges(rank)) {
        EXPECT_EQ(range.local_offset, cursor) << "rank " << rank;
        for (Index i = 0; i < range.length; ++i) {
          EXPECT_EQ(owner[at(range.image_offset + i)], kNobody) << "two owners";
          owner[at(range.image_offset + i)] = rank;
          local[at(range.image_offset + i)] = cursor++;
        }
      }
      EXPECT_EQ(plan.local_numel(rank), cursor) << "rank " << rank;
    }
    for (std::size_t i = 0; i < plan.params.size(); ++i) {
      for (Index element = 0; element < plan.params[i].numel(); ++element) {
        int& slot = param[at(plan.starts[i] + element)];
        EXPECT_EQ(slot, kNobody) << "two parameters at one place";
        slot = static_cast<int>(i);
      }
    }
  }

  std::vector<int> owner;
  std::vector<Index> local;
  std::vector<int> param;
};

void expect_param_in_place(const BucketPlan& plan, const Walk& walk, int i) {
  const ParamSpec& param = plan.params[at(i)];
  SCOPED_TRACE("param '" + param.name + "'");
  const Index start = plan.starts[at(i)];
  if (param.numel() > 0) {
    EXPECT_EQ(start % plan.start_alignment, 0);
  }

  std::map<std::pair<Index, Index>, int> owner_of_block;
  std::vector<Interval> owned(at(plan.world_size));
  for (Index element = 0; element < param.numel(); ++element) {
    const int owner = walk.owner[at(start + element)];
    ASSERT_NE(owner, kNobody) << "element " << element;
    const Index run = param.restart > 0 ? element / param.restart : 0;
    const Index block = (element - run * param.restart) / param.block;
    const int owner_of_first = owner_of_block.try_emplace({run, block}, owner).first->second;
    EXPECT_EQ(owner, owner_of_first) << "element " << element << " is cut from its block";
    Interval& part = owned[at(owner)];
    if (part.empty()) {
      part = {element, element + 1};
      EXPECT_EQ(plan.local_offset(i, owner), walk.local[at(start + element)]) << "rank " << owner;
    } else {
      EXPECT_EQ(part.end, element) << "rank " << owner;
      part.end = element + 1;
    }
  }
  const layout::RaggedShard placement = plan.placement(i);
  for (int rank = 0; rank < plan.world_size; ++rank) {
    EXPECT_EQ(plan.owned(i, rank), owned[at(rank)]) << "rank " << rank;
    const Interval placed = layout::ragged_interval(param.shape, placement, rank);
    EXPECT_EQ(intersect(placed, placed), owned[at(rank)]) << "rank " << rank;
    EXPECT_GE(plan.local_offset(i, rank), 0);
    EXPECT_LE(plan.local_offset(i, rank), plan.local_numel(rank));
  }
}

}  // namespace

BucketPlan hand_written_plan() {
  BucketPlan plan;
  plan.world_size = 3;
  plan.collective_unit = 2;
  plan.params = {
      {.name = "w", .shape = {5, 2}, .block = 2},
      {.name = "b", .shape = {3}},
      {.name = "q", .shape = {4, 3}, .block = 3},
      {.name = "k", .shape = {2, 5}, .block = 10},
      {.name = "empty", .shape = {0, 4}, .trainable = false},
      {.name = "e", .shape = {3, 4}, .block = 4, .trainable = false},
  };
  plan.starts = {0, 13, 28, 18, 40, 40};
  plan.segments = {
      {.numel = 18, .shard_size = 6, .owners = {{0, 6}, {6, 12}, {12, 18}}, .params = {0, 1}},
      {.kind = SegmentKind::kRagged,
       .image_offset = 18,
       .numel = 22,
       .owners = {{28, 34}, {18, 28}, {34, 40}},
       .params = {3, 2}},
      {.image_offset = 40,
       .numel = 24,
       .shard_size = 8,
       .trainable = false,
       .owners = {{40, 48}, {48, 56}, {56, 64}},
       .params = {4, 5}},
  };
  return plan;
}

std::vector<ParamSpec> random_bucket(Seeded& random) {
  std::vector<ParamSpec> params(at(random.between(0, 6)));
  int index = 0;
  for (ParamSpec& param : params) {
    param.name = "p" + std::to_string(index++);
    param.trainable = !random.one_in(4);
    param.shape.resize(at(random.between(0, 4)));
    for (Index& size : param.shape) size = random.one_in(15) ? 0 : random.between(1, 5);
    const Index numel = param.numel();
    if (numel == 0) continue;
    // A prime now and then, which nothing but itself divides.
    const bool is_vector = param.shape.size() == 1;
    if (is_vector) param.shape[0] = random.pick(std::vector<Index>{1, 7, 16, 31, 97});
    param.block = random.one_in(6) ? param.numel() : random.between(1, std::min<Index>(param.numel(), 12));
    const bool is_stack = param.shape.size() >= 3;
    if (is_stack) {
      const std::size_t rank = param.shape.size();
      param.restart = param.shape[rank - 2] * param.shape[rank - 1];
      param.block = random.between(1, param.shape[rank - 2]) * param.shape[rank - 1];
    }
  }
  return params;
}

PlanOptions random_options(Seeded& random) {
  const Index unit = random.pick(std::vector<Index>{1, 2, 3, 4, 8});
  return {
      .world_size = static_cast<int>(random.pick(std::vector<Index>{1, 2, 3, 4, 7})),
      .collective_unit = unit,
      .start_alignment = random.one_in(2) ? unit : 1};
}

plan::Inventory bundled_model(const std::string& name) {
  std::ifstream file(std::string(RAGGED_MODELS_DIR) + "/" + name + ".json");
  RAGGED_CHECK(file.good(), "[test] Expected a bundled model, but got '{}'.", name);
  return plan::inventory_from_json(std::string(std::istreambuf_iterator<char>(file), {}));
}

void expect_every_element_in_place(const BucketPlan& plan) {
  const Walk walk(plan);
  for (std::size_t i = 0; i < plan.params.size(); ++i) {
    expect_param_in_place(plan, walk, static_cast<int>(i));
  }

  std::vector<Interval> gaps;
  Index padding = 0;
  for (Index element = 0; element < plan.image_numel(); ++element) {
    if (walk.param[at(element)] != kNobody) continue;
    ++padding;
    if (gaps.empty() || gaps.back().end != element) gaps.push_back({element, element});
    gaps.back().end = element + 1;
  }
  EXPECT_EQ(plan.padding(), padding);
  // One gap may be told as two where segments meet.
  std::vector<Interval> merged;
  for (const Interval& gap : plan.gaps()) {
    EXPECT_FALSE(gap.empty());
    if (!merged.empty() && merged.back().end == gap.begin) {
      merged.back().end = gap.end;
    } else {
      merged.push_back(gap);
    }
  }
  EXPECT_EQ(merged, gaps);

  for (const Segment& segment : plan.segments) {
    if (segment.kind != SegmentKind::kUniform) continue;
    EXPECT_EQ(segment.shard_size % plan.collective_unit, 0);
    for (const Interval& own : segment.owners) EXPECT_EQ(own.size(), segment.shard_size);
  }
}

}  // namespace ragged::testing
