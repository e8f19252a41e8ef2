#include "ragged/plan/bucket_plan.h"

#include <functional>
#include <set>

#include "ragged/plan/planner.h"
#include "tests/plan/plans.h"
#include "tests/support/expect_error.h"

namespace ragged::plan {
namespace {

using layout::RaggedShard;
using ::ragged::testing::expect_every_element_in_place;
using ::ragged::testing::hand_written_plan;

TEST(BucketPlan, written_by_hand_is_legal) {
  const BucketPlan plan = hand_written_plan();
  validate(plan);
  expect_every_element_in_place(plan);
}

TEST(BucketPlan, counts_image_and_padding_over_segments) {
  const BucketPlan plan = hand_written_plan();
  EXPECT_EQ(plan.image_numel(), 64);
  EXPECT_EQ(plan.image_numel(0), 0);
  EXPECT_EQ(plan.image_numel(1), 18);
  EXPECT_EQ(plan.image_numel(2), 40);
  EXPECT_EQ(plan.num_trainable_segments(), 2);
  EXPECT_EQ(plan.padding(), 64 - (10 + 3 + 12 + 10 + 12));
}

TEST(BucketPlan, gives_a_rank_one_range_a_segment) {
  const BucketPlan plan = hand_written_plan();
  EXPECT_EQ(plan.ranges(0), (std::vector<SegmentRange>{{0, 0, 6}, {28, 6, 6}, {40, 12, 8}}));
  EXPECT_EQ(plan.ranges(1), (std::vector<SegmentRange>{{6, 0, 6}, {18, 6, 10}, {48, 16, 8}}));
  EXPECT_EQ(plan.ranges(2), (std::vector<SegmentRange>{{12, 0, 6}, {34, 6, 6}, {56, 12, 8}}));
  EXPECT_EQ(plan.local_numel(0), 20);
  EXPECT_EQ(plan.local_numel(1), 24);
  EXPECT_EQ(plan.local_numel(1, 2), 16);
  EXPECT_EQ(plan.local_numel(1, 0), 0);
}

TEST(BucketPlan, says_who_owns_what_of_a_uniform_parameter) {
  const BucketPlan plan = hand_written_plan();
  constexpr int kW = 0;
  EXPECT_EQ(plan.segment_of(kW), 0);
  EXPECT_EQ(plan.image_interval(kW), (Interval{0, 10}));
  EXPECT_EQ(plan.owned(kW, 0), (Interval{0, 6}));
  EXPECT_EQ(plan.owned(kW, 1), (Interval{6, 10}));
  EXPECT_EQ(plan.owned(kW, 2), Interval{});
  EXPECT_EQ(plan.local_offset(kW, 1), 0);
  EXPECT_EQ(plan.placement(kW), RaggedShard(1, {3, 2, 0}));
}

TEST(BucketPlan, says_who_owns_what_of_a_ragged_parameter) {
  const BucketPlan plan = hand_written_plan();
  constexpr int kQ = 2;
  constexpr int kK = 3;
  EXPECT_EQ(plan.segment_of(kQ), 1);
  EXPECT_EQ(plan.owned(kQ, 0), (Interval{0, 6}));
  EXPECT_EQ(plan.owned(kQ, 1), Interval{});
  EXPECT_EQ(plan.owned(kQ, 2), (Interval{6, 12}));
  EXPECT_EQ(plan.local_offset(kQ, 0), 6);
  EXPECT_EQ(plan.local_offset(kQ, 2), 6);
  EXPECT_EQ(plan.placement(kQ), RaggedShard(1, {1, 0, 1}));
  EXPECT_EQ(plan.owned(kK, 1), (Interval{0, 10}));
  EXPECT_EQ(plan.placement(kK), RaggedShard(0, {0, 1, 0}));
}

TEST(BucketPlan, says_where_the_part_of_a_rank_without_one_would_start) {
  const BucketPlan plan = hand_written_plan();
  EXPECT_EQ(plan.local_offset(0, 2), 0) << "w lies before rank 2's first range";
  EXPECT_EQ(plan.local_offset(1, 0), 6) << "b lies after rank 0's first range";
  EXPECT_EQ(plan.local_offset(2, 1), 16) << "q lies after rank 1's second range";
  EXPECT_EQ(plan.local_offset(3, 0), 6) << "k lies before rank 0's second range";
}

TEST(BucketPlan, of_an_empty_parameter_has_no_units) {
  const BucketPlan plan = hand_written_plan();
  constexpr int kEmpty = 4;
  EXPECT_EQ(plan.segment_of(kEmpty), 2);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(plan.owned(kEmpty, rank), Interval{});
  EXPECT_EQ(plan.placement(kEmpty), RaggedShard(1, {0, 0, 0}));
}

TEST(BucketPlan, tells_gaps_between_and_after_parameters) {
  EXPECT_EQ(hand_written_plan().gaps(), (std::vector<Interval>{{10, 13}, {16, 18}, {52, 64}}));
}

TEST(BucketPlan, without_segments_is_empty) {
  const BucketPlan plan;
  validate(plan);
  EXPECT_EQ(plan.image_numel(), 0);
  EXPECT_EQ(plan.padding(), 0);
  EXPECT_TRUE(plan.ranges(0).empty());
  EXPECT_TRUE(plan.gaps().empty());
  EXPECT_EQ(plan.local_numel(0), 0);
}

TEST(BucketPlan, refuses_ranks_parameters_and_segments_out_of_range) {
  const BucketPlan plan = hand_written_plan();
  EXPECT_INVALID(plan.ranges(3), "a rank in [0, 3), but got 3");
  EXPECT_INVALID(plan.ranges(-1), "got -1");
  EXPECT_INVALID(plan.local_numel(3), "got 3");
  EXPECT_INVALID(plan.local_numel(0, 4), "at most 3 segments, but got 4");
  EXPECT_INVALID(plan.image_numel(-1), "got -1");
  EXPECT_INVALID(plan.owned(6, 0), "a parameter in [0, 6), but got 6");
  EXPECT_INVALID(plan.owned(0, 3), "got 3");
  EXPECT_INVALID(plan.local_offset(-1, 0), "got -1");
  EXPECT_INVALID(plan.placement(6), "got 6");
  EXPECT_INVALID(plan.segment_of(6), "got 6");
  EXPECT_INVALID(plan.image_interval(6), "got 6");
}

TEST(BucketPlan, refuses_to_look_for_a_parameter_that_no_segment_holds) {
  BucketPlan plan = hand_written_plan();
  plan.segments[0].params = {0};
  EXPECT_INVALID(plan.segment_of(1), "(param 'b')");
}

TEST(BucketPlanHash, is_the_same_on_every_machine) {
  EXPECT_EQ(hash(hand_written_plan()), hash(hand_written_plan()));
  EXPECT_EQ(hash(hand_written_plan()), 15364206038781470584ULL);
  EXPECT_EQ(hash(BucketPlan{}), 1915859378800715972ULL);
}

TEST(BucketPlanHash, changes_with_every_field) {
  const std::vector<std::function<void(BucketPlan&)>> changes{
      [](BucketPlan& p) { p.world_size = 4; },
      [](BucketPlan& p) { p.collective_unit = 4; },
      [](BucketPlan& p) { p.start_alignment = 2; },
      [](BucketPlan& p) { p.lower_bound = 1; },
      [](BucketPlan& p) { p.params[0].name = "v"; },
      [](BucketPlan& p) {
        p.params[0].shape = {2, 5};
      },
      [](BucketPlan& p) { p.params[0].block = 1; },
      [](BucketPlan& p) { p.params[0].restart = 2; },
      [](BucketPlan& p) { p.params[0].trainable = false; },
      [](BucketPlan& p) { p.params.pop_back(); },
      [](BucketPlan& p) { p.starts[1] = 14; },
      [](BucketPlan& p) { p.segments[0].kind = SegmentKind::kOpaque; },
      [](BucketPlan& p) { p.segments[0].image_offset = 1; },
      [](BucketPlan& p) { p.segments[0].numel = 17; },
      [](BucketPlan& p) { p.segments[0].shard_size = 5; },
      [](BucketPlan& p) { p.segments[0].trainable = false; },
      [](BucketPlan& p) { p.segments[0].owners[0].end = 5; },
      [](BucketPlan& p) {
        p.segments[0].params = {1, 0};
      },
      [](BucketPlan& p) { p.segments.pop_back(); },
  };
  std::set<std::uint64_t> hashes{hash(hand_written_plan())};
  for (const auto& change : changes) {
    BucketPlan plan = hand_written_plan();
    change(plan);
    hashes.insert(hash(plan));
  }
  EXPECT_EQ(hashes.size(), changes.size() + 1);
}

TEST(BucketPlan, prints_a_line_a_segment_and_a_parameter) {
  const std::string text = to_string(hand_written_plan());
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1 + 3 + 6);
  EXPECT_THAT(text, ::testing::HasSubstr("image 64 elements (17 padding"));
  EXPECT_THAT(text, ::testing::HasSubstr("trainable ragged segment [18, 40)"));
  EXPECT_THAT(text, ::testing::HasSubstr("frozen uniform segment [40, 64), shard 8"));
  EXPECT_THAT(text, ::testing::HasSubstr("w [5, 2] at [0, 10), block 2\n"));
}

}  // namespace
}  // namespace ragged::plan
