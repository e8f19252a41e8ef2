// Plans that are wrong in one way each are refused, and for that reason.
#include <functional>

#include "ragged/plan/bucket_plan.h"
#include "ragged/plan/planner.h"
#include "tests/plan/plans.h"
#include "tests/support/expect_error.h"

namespace ragged::plan {
namespace {

using ::ragged::testing::hand_written_plan;
using ::ragged::testing::random_bucket;
using ::ragged::testing::random_options;
using ::ragged::testing::Seeded;

struct Mutation {
  std::string reason;
  std::function<void(BucketPlan&)> apply;
};

void expect_refused(const BucketPlan& plan, const std::vector<Mutation>& mutations) {
  validate(plan);
  for (const Mutation& mutation : mutations) {
    SCOPED_TRACE(mutation.reason);
    BucketPlan mutated = plan;
    mutation.apply(mutated);
    EXPECT_INVALID(validate(mutated), mutation.reason);
  }
}

TEST(Validate, refuses_wrong_numbers) {
  expect_refused(
      hand_written_plan(),
      {{"world size of at least 1", [](BucketPlan& p) { p.world_size = 0; }},
       {"collective unit of at least 1", [](BucketPlan& p) { p.collective_unit = 0; }},
       {"divides the collective unit 2", [](BucketPlan& p) { p.start_alignment = 3; }},
       {"divides the collective unit 2", [](BucketPlan& p) { p.start_alignment = 0; }},
       {"6 starts", [](BucketPlan& p) { p.starts.pop_back(); }},
       {"a lower bound of 0", [](BucketPlan& p) { p.lower_bound = -1; }}});
}

TEST(Validate, refuses_wrong_parameters) {
  expect_refused(
      hand_written_plan(),
      {{"got -5 (param 'w')", [](BucketPlan& p) { p.params[0].shape[0] = -5; }},
       {"a block of 1 to 10 elements, but got 0 (param 'w')", [](BucketPlan& p) { p.params[0].block = 0; }},
       {"but got 11 (param 'w')", [](BucketPlan& p) { p.params[0].block = 11; }},
       {"a restart of 0 or at least the block 2, but got 1", [](BucketPlan& p) { p.params[0].restart = 1; }},
       {"a restart of 0", [](BucketPlan& p) { p.params[0].restart = -2; }},
       {"2^63", [](BucketPlan& p) {
          p.params[0].shape = {Index{1} << 40, Index{1} << 40};
        }}});
}

TEST(Validate, refuses_wrong_segments) {
  expect_refused(
      hand_written_plan(),
      {{"segment 1 at 18, but got 19", [](BucketPlan& p) { p.segments[1].image_offset = 19; }},
       {"got -22 (segment 1)", [](BucketPlan& p) { p.segments[1].numel = -22; }},
       {"0 to 2^63 elements", [](BucketPlan& p) { p.segments[1].numel = std::numeric_limits<Index>::max(); }},
       {"trainable segments first", [](BucketPlan& p) { p.segments[0].trainable = false; }},
       {"trainable and frozen parameters apart", [](BucketPlan& p) { p.params[3].trainable = false; }},
       {"a shard size of 0 in a segment that isn't uniform", [](BucketPlan& p) { p.segments[1].shard_size = 2; }},
       {"a multiple of the collective unit 4", [](BucketPlan& p) { p.collective_unit = 4; }},
       {"a multiple of the collective unit", [](BucketPlan& p) { p.segments[0].shard_size = -6; }},
       {"equal shards of 4", [](BucketPlan& p) { p.segments[0].shard_size = 4; }},
       {"a segment, but got none (param 'e')", [](BucketPlan& p) { p.segments[2].params = {4}; }},
       {"a segment, but got none (param 'empty')", [](BucketPlan& p) { p.segments[2].params = {5}; }},
       {"segments 0 and 1 (param 'w')",
        [](BucketPlan& p) {
          p.segments[1].params = {0, 3, 2};
        }},
       {"parameters in [0, 6), but got 6",
        [](BucketPlan& p) {
          p.segments[2].params = {4, 6};
        }},
       {"but got -1", [](BucketPlan& p) {
          p.segments[2].params = {-1, 5};
        }}});
}

TEST(Validate, refuses_wrong_owners) {
  expect_refused(
      hand_written_plan(),
      {{"3 owners", [](BucketPlan& p) { p.segments[1].owners.pop_back(); }},
       {"the uniform shard [6, 12), but got [6, 11)", [](BucketPlan& p) { p.segments[0].owners[1].end = 11; }},
       {"the uniform shard", [](BucketPlan& p) { std::swap(p.segments[0].owners[0], p.segments[0].owners[1]); }},
       {"within [18, 40), but got [28, 41)",
        [](BucketPlan& p) {
          p.segments[1].owners[0] = {28, 41};
        }},
       {"within [18, 40), but got [17, 28)", [](BucketPlan& p) { p.segments[1].owners[1].begin = 17; }},
       {"within [18, 40), but got [34, 28)",
        [](BucketPlan& p) {
          p.segments[1].owners[0] = {34, 28};
        }},
       {"an empty interval within the image",
        [](BucketPlan& p) {
          p.segments[1].owners[0] = {99, 99};
        }},
       {"ranks 0 and 2 both owning 33", [](BucketPlan& p) { p.segments[1].owners[2].begin = 33; }},
       {"none for element 6 (param 'q')", [](BucketPlan& p) { p.segments[1].owners[2] = {}; }},
       {"none for element 0 (param 'k')", [](BucketPlan& p) { p.segments[1].owners[1].begin = 19; }},
       {"rank 0 after 2 (param 'q')",
        [](BucketPlan& p) { std::swap(p.segments[1].owners[0], p.segments[1].owners[2]); }},
       {"inside a block of 3, but got one at element 5 (param 'q')",
        [](BucketPlan& p) {
          p.segments[1].owners[0].end = 33;
          p.segments[1].owners[2].begin = 33;
        }},
       {"inside a block of 4, but got one at element 6 (param 'w')", [](BucketPlan& p) { p.params[0].block = 4; }}});
}

TEST(Validate, refuses_wrong_starts) {
  expect_refused(
      hand_written_plan(),
      {{"between 10 and 18, but got a start of 9 (segment 0, param 'b')", [](BucketPlan& p) { p.starts[1] = 9; }},
       {"got a start of 16 (segment 0, param 'b')", [](BucketPlan& p) { p.starts[1] = 16; }},
       {"got a start of -1 (segment 0, param 'w')", [](BucketPlan& p) { p.starts[0] = -1; }},
       {"(segment 0, param 'w')", [](BucketPlan& p) { p.starts[0] = std::numeric_limits<Index>::max(); }},
       {"(segment 0, param 'b')", [](BucketPlan& p) { p.starts[1] = 20; }},
       {"inside a block of 2, but got one at element 5 (param 'w')", [](BucketPlan& p) { p.starts[0] = 1; }},
       {"a multiple of 2, but got 13 (param 'b')", [](BucketPlan& p) { p.start_alignment = 2; }},
       {"(segment 2, param 'empty')", [](BucketPlan& p) { p.starts[4] = 39; }},
       {"(segment 2, param 'e')", [](BucketPlan& p) { p.starts[4] = 41; }},
       {"no padding in a ragged segment but for alignment, but got 2 elements (param 'q')",
        [](BucketPlan& p) {
          p.params[3].shape = {2, 4};
          p.params[3].block = 8;
        }},
       {"no padding in a ragged segment, but got 3 elements at its end", [](BucketPlan& p) {
          p.params[2].shape = {3, 3};
          p.segments[1].owners[2].end = 37;
        }}});
}

TEST(Validate, accepts_any_order_of_ragged_owners_that_ascends_within_a_parameter) {
  BucketPlan plan = hand_written_plan();
  // k on rank 2, q on ranks 0 and 1.
  plan.segments[1].owners = {{28, 31}, {31, 40}, {18, 28}};
  validate(plan);
  // A rank in between may be empty, wherever its interval claims to lie.
  plan.segments[1].owners = {{18, 34}, {}, {34, 40}};
  validate(plan);
}

TEST(Validate, accepts_padding_in_a_ragged_segment_as_far_as_alignment_needs_it) {
  BucketPlan plan = hand_written_plan();
  plan.start_alignment = 2;
  plan.starts[1] = 14;
  plan.params[3].shape = {3, 3};
  plan.params[3].block = 9;
  validate(plan);
  plan.segments[1].owners[1] = {18, 27};
  validate(plan);
}

TEST(Validate, accepts_padding_in_an_opaque_segment) {
  BucketPlan plan = hand_written_plan();
  plan.segments[1].kind = SegmentKind::kOpaque;
  plan.params[3].shape = {2, 4};
  plan.params[3].block = 8;
  validate(plan);
}

TEST(Validate, accepts_a_border_exactly_where_a_block_begins_since_the_last_restart) {
  // One matrix is 20 elements: blocks at 0, 8, 16 (short), 20, 28, 36 (short), 40, ...
  const std::vector<Index> legal{0, 8, 16, 20, 28, 36, 40, 48, 56, 60};
  for (Index border = 0; border <= 60; ++border) {
    BucketPlan plan;
    plan.world_size = 2;
    plan.params = {{.name = "experts", .shape = {3, 5, 4}, .block = 8, .restart = 20}};
    plan.starts = {0};
    plan.segments = {{.kind = SegmentKind::kRagged, .numel = 60, .owners = {{0, border}, {border, 60}}, .params = {0}}};
    if (std::find(legal.begin(), legal.end(), border) != legal.end()) {
      EXPECT_NO_THROW(validate(plan)) << "border " << border;
    } else {
      EXPECT_INVALID(validate(plan), "inside a block of 8");
    }
  }
}

TEST(Validate, holds_the_bound_against_uniform_segments_only) {
  BucketPlan plan = hand_written_plan();
  plan.lower_bound = 1000;
  EXPECT_NO_THROW(validate(plan)) << "a ragged segment may pass below the bound";
  BucketPlan uniform = plan_bucket(std::vector<ParamSpec>{{.name = "w", .shape = {64}}}, {.world_size = 4});
  uniform.lower_bound = uniform.image_numel() + 1;
  EXPECT_INVALID(validate(uniform), "a lower bound of 0 to 64, but got 65");
}

TEST(Validate, refuses_every_shift_of_one_border_or_start_into_a_block) {
  constexpr std::uint64_t kSeed = 99;
  Seeded random(kSeed);
  int num_mutated = 0;
  for (int trial = 0; trial < 400; ++trial) {
    SCOPED_TRACE(fmt::format("seed {}, trial {}", kSeed, trial));
    const BucketPlan plan = plan_bucket(random_bucket(random), random_options(random));
    for (std::size_t i = 0; i < plan.params.size(); ++i) {
      if (plan.params[i].numel() == 0) continue;
      BucketPlan moved = plan;
      moved.starts[i] = -1;
      EXPECT_INVALID(validate(moved), plan.params[i].name);
      moved.starts[i] = plan.image_numel();
      EXPECT_INVALID(validate(moved), plan.params[i].name);
      ++num_mutated;
    }
    for (std::size_t s = 0; s < plan.segments.size(); ++s) {
      if (plan.segments[s].numel == 0) continue;
      BucketPlan unequal = plan;
      unequal.segments[s].owners[0].end -= 1;
      EXPECT_INVALID(validate(unequal), "uniform shard");
      BucketPlan longer = plan;
      longer.segments[s].shard_size += plan.collective_unit;
      EXPECT_INVALID(validate(longer), "equal shards");
      ++num_mutated;
    }
  }
  EXPECT_GT(num_mutated, 500);
}

}  // namespace
}  // namespace ragged::plan
