#include "ragged/plan/planner.h"

#include "ragged/plan/block.h"
#include "tests/plan/plans.h"
#include "tests/support/expect_error.h"

namespace ragged::plan {
namespace {

using ::ragged::testing::expect_every_element_in_place;
using ::ragged::testing::random_bucket;
using ::ragged::testing::random_options;
using ::ragged::testing::Seeded;

// One transformer layer with rows as blocks; a prefix makes its names its own.
std::vector<ParamSpec> layer(const std::string& prefix, Index rows_per_block) {
  const auto matrix = [&](const char* name, Index rows_count, Index columns) {
    ParamSpec param{.name = prefix + name, .shape = {rows_count, columns}};
    param.block = block_extent(rows(rows_per_block), param.shape, param.name).block;
    return param;
  };
  return {
      matrix("wq", 48, 24),
      {.name = prefix + "norm", .shape = {24}},
      matrix("wk", 12, 24),
      matrix("w1", 67, 24),
      matrix("w2", 24, 67)};
}

TEST(Planner, keeps_blocks_whole_when_world_is_prime) {
  for (int world_size : {2, 3, 7, 13}) {
    const BucketPlan plan = plan_bucket(layer("", 5), {.world_size = world_size});
    validate(plan);
    expect_every_element_in_place(plan);
  }
}

TEST(Planner, keeps_module_order_and_puts_frozen_parameters_last) {
  std::vector<ParamSpec> params = layer("layers.0.", 4);
  params[0].trainable = false;
  params[3].trainable = false;
  const BucketPlan plan = plan_bucket(params, {.world_size = 4});
  ASSERT_EQ(plan.segments.size(), 2u);
  EXPECT_TRUE(plan.segments[0].trainable);
  EXPECT_FALSE(plan.segments[1].trainable);
  EXPECT_EQ(plan.segments[0].params, (std::vector<int>{1, 2, 4}));
  EXPECT_EQ(plan.segments[1].params, (std::vector<int>{0, 3}));
  EXPECT_EQ(plan.params, params);
  EXPECT_EQ(plan.num_trainable_segments(), 1);
  validate(plan);
}

TEST(Planner, of_no_parameters_is_empty) {
  const BucketPlan plan = plan_bucket({}, {.world_size = 3});
  EXPECT_TRUE(plan.segments.empty());
  EXPECT_EQ(plan.world_size, 3);
  EXPECT_EQ(plan.lower_bound, 0);
  validate(plan);
}

TEST(Planner, gives_empty_parameters_a_segment_of_size_zero) {
  const std::vector<ParamSpec> params{{.name = "a", .shape = {0, 4}}, {.name = "b", .shape = {8}, .trainable = false}};
  const BucketPlan plan = plan_bucket(params, {.world_size = 2});
  ASSERT_EQ(plan.segments.size(), 2u);
  EXPECT_EQ(plan.segments[0].shard_size, 0);
  EXPECT_EQ(plan.segments[0].params, std::vector<int>{0});
  EXPECT_EQ(plan.segments[1].image_offset, 0);
  EXPECT_EQ(plan.segment_of(0), 0);
  EXPECT_EQ(plan.segment_of(1), 1);
  validate(plan);
  expect_every_element_in_place(plan);
}

TEST(Planner, has_empty_ranks_where_blocks_run_out) {
  const std::vector<ParamSpec> params{{.name = "w", .shape = {3, 8}, .block = 8}};
  const BucketPlan plan = plan_bucket(params, {.world_size = 7});
  EXPECT_EQ(plan.segments[0].shard_size, 8);
  EXPECT_EQ(plan.placement(0), layout::RaggedShard(1, {1, 1, 1, 0, 0, 0, 0}));
  EXPECT_EQ(plan.padding(), 4 * 8);
  validate(plan);
}

TEST(Planner, puts_a_whole_tensor_on_one_rank) {
  const std::vector<ParamSpec> params{{.name = "w", .shape = {5, 8}, .block = 40}, {.name = "b", .shape = {5}}};
  const BucketPlan plan = plan_bucket(params, {.world_size = 4});
  EXPECT_EQ(plan.segments[0].shard_size, 40);
  EXPECT_EQ(plan.placement(0).dims(), 0);
  validate(plan);
}

TEST(Planner, states_a_bound_that_it_reaches_where_blocks_are_the_limit) {
  const std::vector<ParamSpec> params{{.name = "w", .shape = {9, 8}, .block = 8}};
  const BucketPlan plan = plan_bucket(params, {.world_size = 4});
  EXPECT_EQ(plan.lower_bound, 4 * 24);
  EXPECT_EQ(plan.image_numel(), plan.lower_bound);
}

TEST(Planner, sums_its_bound_over_segments) {
  const std::vector<ParamSpec> params{
      {.name = "w", .shape = {9, 8}, .block = 8}, {.name = "f", .shape = {2, 8}, .block = 16, .trainable = false}};
  const BucketPlan plan = plan_bucket(params, {.world_size = 4});
  EXPECT_EQ(plan.lower_bound, 4 * (24 + 16));
}

TEST(Planner, ignores_restarts_that_blocks_divide) {
  const ParamSpec flat{.name = "w", .shape = {3, 4, 5}, .block = 10};
  ParamSpec stack = flat;
  stack.restart = 20;
  for (int world_size : {1, 2, 3, 4, 7}) {
    const PlanOptions options{.world_size = world_size, .collective_unit = 2, .start_alignment = 2};
    const std::vector<ParamSpec> with_restart{stack};
    BucketPlan plan = plan_bucket(with_restart, options);
    validate(plan);
    plan.params[0] = flat;
    EXPECT_EQ(plan, plan_bucket(std::vector<ParamSpec>{flat}, options));
  }
}

TEST(Planner, keeps_matrices_of_a_stack_whole_where_blocks_leave_a_rest) {
  // Two rows of four, five rows a matrix: the third block of each is short.
  const std::vector<ParamSpec> params{{.name = "experts", .shape = {6, 5, 4}, .block = 8, .restart = 20}};
  const BucketPlan plan = plan_bucket(params, {.world_size = 4, .collective_unit = 4, .start_alignment = 4});
  validate(plan);
  expect_every_element_in_place(plan);
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(plan.owned(0, rank).begin % 20, 0);
  // The bound speaks of blocks and not of the whole matrices that this planner keeps.
  EXPECT_LT(plan.lower_bound, plan.image_numel());
  EXPECT_EQ(plan.lower_bound, 4 * 32);
}

TEST(Planner, takes_a_stack_of_very_many_matrices) {
  const std::vector<ParamSpec> params{{.name = "experts", .shape = {Index{1} << 40, 5, 4}, .block = 8, .restart = 20}};
  const BucketPlan plan = plan_bucket(params, {.world_size = 7});
  validate(plan);
  EXPECT_LE(plan.lower_bound, plan.image_numel());
}

TEST(Planner, makes_legal_plans_of_random_buckets) {
  constexpr std::uint64_t kSeed = 2602;
  Seeded random(kSeed);
  for (int trial = 0; trial < 1500; ++trial) {
    const std::vector<ParamSpec> params = random_bucket(random);
    const PlanOptions options = random_options(random);
    SCOPED_TRACE(fmt::format("seed {}, trial {}", kSeed, trial));
    const BucketPlan plan = plan_bucket(params, options);
    ASSERT_NO_THROW(validate(plan)) << to_string(plan);
    expect_every_element_in_place(plan);
    EXPECT_LE(plan.lower_bound, plan.image_numel());
    EXPECT_EQ(plan, plan_bucket(params, options));
    if (::testing::Test::HasFailure()) FAIL() << to_string(plan);
  }
}

TEST(Planner, plans_buckets_as_it_plans_each) {
  std::vector<std::vector<ParamSpec>> buckets;
  for (int i = 0; i < 6; ++i) buckets.push_back(layer(fmt::format("layers.{}.", i), i < 4 ? 4 : 3));
  buckets.push_back({});
  buckets.push_back(layer("frozen.", 4));
  buckets.back()[2].trainable = false;
  buckets.push_back(layer("again.", 4));
  const PlanOptions options{.world_size = 7};
  const std::vector<BucketPlan> plans = plan_buckets(buckets, options);
  ASSERT_EQ(plans.size(), buckets.size());
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    EXPECT_EQ(plans[i], plan_bucket(buckets[i], options)) << "bucket " << i;
  }
}

TEST(Planner, tells_buckets_apart_that_hold_the_same_numbers) {
  // The same sequence of sizes, blocks and flags in two groupings.
  const std::vector<std::vector<ParamSpec>> buckets{
      {{.name = "a", .shape = {2, 3}}, {.name = "b", .shape = {6}}},
      {{.name = "a", .shape = {6}}, {.name = "b", .shape = {2, 3}}},
      {{.name = "a", .shape = {2, 3}, .block = 3}, {.name = "b", .shape = {6}}},
      {{.name = "a", .shape = {2, 3}}, {.name = "b", .shape = {6}, .restart = 3}}};
  const PlanOptions options{.world_size = 2};
  const std::vector<BucketPlan> plans = plan_buckets(buckets, options);
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    EXPECT_EQ(plans[i], plan_bucket(buckets[i], options)) << "bucket " << i;
  }
}

TEST(Planner, each_parameter_evenly_is_what_chunk_makes_of_rows) {
  for (const int world : {1, 2, 3, 4, 7}) {
    for (const Index rows : {0, 1, 5, 8, 13}) {
      const Index columns = 3;
      const std::vector<ParamSpec> params{
          {.name = "frozen", .shape = {rows, columns}, .block = rows > 0 ? columns : 1, .trainable = false},
          {.name = "w", .shape = {rows, columns}, .block = rows > 0 ? columns : 1}};
      const BucketPlan plan = plan_each_evenly(params, world);
      validate(plan);
      const Index each = (rows + world - 1) / world;
      for (int rank = 0; rank < world; ++rank) {
        const Index begin = std::min(rows, each * rank) * columns;
        const Index end = std::min(rows, each * (rank + 1)) * columns;
        for (const int param : {0, 1}) EXPECT_EQ(plan.owned(param, rank).size(), end - begin) << rows << "/" << world;
        if (end > begin) {
          EXPECT_EQ(plan.owned(1, rank), (Interval{begin, end}));
        }
      }
      EXPECT_EQ(plan.num_trainable_segments(), 1);
    }
  }
}

TEST(Planner, refuses_bad_options) {
  const std::vector<ParamSpec> params{{.name = "w", .shape = {4}}};
  EXPECT_INVALID(plan_bucket(params, {.world_size = 0}), "[plan] Expected a world size of at least 1, but got 0");
  EXPECT_INVALID(plan_bucket(params, {.world_size = -3}), "got -3");
  EXPECT_INVALID(plan_bucket(params, {.collective_unit = 0}), "collective unit of at least 1");
  EXPECT_INVALID(
      plan_bucket(params, {.collective_unit = 8, .start_alignment = 16}), "divides the collective unit 8, but got 16");
  EXPECT_INVALID(plan_bucket(params, {.start_alignment = -8}), "got -8");
  EXPECT_INVALID(plan_bucket({}, {.world_size = 0}), "world size");
  EXPECT_INVALID(plan_buckets({}, {.world_size = 0}), "world size");
}

TEST(Planner, refuses_bad_parameters_by_name) {
  const auto plan_one = [](ParamSpec param) {
    param.name = "layers.3.wq";
    const std::vector<ParamSpec> params{{.name = "fine", .shape = {4}}, std::move(param)};
    return plan_bucket(params, {.world_size = 2});
  };
  EXPECT_INVALID(plan_one({.shape = {4, -1}}), "got -1 (param 'layers.3.wq')");
  EXPECT_INVALID(plan_one({.shape = {4, 4}, .block = 0}), "got 0 (param 'layers.3.wq')");
  EXPECT_INVALID(plan_one({.shape = {4, 4}, .block = 17}), "16 elements, but got 17 (param 'layers.3.wq')");
  EXPECT_INVALID(plan_one({.shape = {0, 4}, .block = 0}), "(param 'layers.3.wq')");
  EXPECT_INVALID(plan_one({.shape = {4, 4}, .block = 4, .restart = 3}), "but got 3 (param 'layers.3.wq')");
  EXPECT_INVALID(plan_one({.shape = {4, 4}, .restart = -1}), "(param 'layers.3.wq')");
  EXPECT_INVALID(
      plan_one({.shape = {Index{1} << 32, Index{1} << 32}}),
      "fewer than 2^63 elements, but got more (param 'layers.3.wq')");
  EXPECT_INVALID(plan_one({.shape = {Index{1} << 60}}), "for 2 ranks, but got more (param 'layers.3.wq')");
  EXPECT_NO_THROW(plan_one({.shape = {0, 4}, .block = 100}));
}

}  // namespace
}  // namespace ragged::plan
