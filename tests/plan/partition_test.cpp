// Buckets in several uniform segments and a ragged tail: against a search that tries everything,
// and by the rules.
#include <numeric>

#include "ragged/plan/plan_json.h"
#include "ragged/plan/planner.h"
#include "tests/plan/plans.h"
#include "tests/support/expect_error.h"

namespace ragged::plan {
namespace {

using ::ragged::testing::bundled_model;
using ::ragged::testing::expect_every_element_in_place;
using ::ragged::testing::random_bucket;
using ::ragged::testing::random_options;
using ::ragged::testing::Seeded;

std::size_t at(Index i) {
  return static_cast<std::size_t>(i);
}

std::vector<ParamSpec> params_of(const std::vector<Extent>& extents) {
  std::vector<ParamSpec> params;
  for (const Extent& extent : extents) {
    params.push_back({.name = fmt::format("p{}", params.size()), .shape = {extent.numel}, .block = extent.block});
  }
  return params;
}

// The slow twin: every assignment of tensors to segments or the tail, every order of the classes in
// a segment, every shard size, every start.
class Exhaustive {
 public:
  Exhaustive(const std::vector<Extent>& extents, const PlanOptions& options)
      : extents_(extents), options_(options), shards_(at(Index{1} << extents.size()), -1) {}

  // {all orders, orders that keep equal tensors together}: the planner is between the two.
  std::pair<Index, Index> cheapest() {
    const Index any = cheapest_with(false);
    std::fill(shards_.begin(), shards_.end(), -1);
    return {any, cheapest_with(true)};
  }

 private:
  Index cheapest_with(bool keeps_equal_together) {
    const Index num_homes = options_.max_uniform_segments + 1;  // the first is the tail
    Index num_choices = 1;
    for (std::size_t i = 0; i < extents_.size(); ++i) num_choices *= num_homes;
    Index best = -1;
    for (Index choice = 0; choice < num_choices; ++choice) {
      std::vector<Index> members(at(num_homes), 0);
      Index rest = choice;
      for (std::size_t i = 0; i < extents_.size(); ++i) {
        members[at(rest % num_homes)] |= Index{1} << i;
        rest /= num_homes;
      }
      Index cost = tail_cost(members[0]);
      if (cost < 0) continue;
      for (Index home = 1; home < num_homes; ++home) {
        if (members[at(home)] == 0) continue;
        cost += options_.world_size * shard(members[at(home)], keeps_equal_together) + options_.cost.uniform_segment;
      }
      if (best < 0 || cost < best) best = cost;
    }
    return best;
  }

  Index tail_cost(Index members) const {
    Index numel = 0;
    Index blocks = 0;
    for (std::size_t i = 0; i < extents_.size(); ++i) {
      if ((members >> i & 1) == 0) continue;
      numel += extents_[i].numel;
      blocks += ceil_div(extents_[i].numel, extents_[i].block);
    }
    if (blocks > options_.max_ragged_blocks) return -1;
    if (numel == 0) return 0;
    return round_up(numel, options_.collective_unit) + options_.cost.ragged_segment +
        options_.cost.ragged_block * blocks;
  }

  Index shard(Index members, bool keeps_equal_together) {
    Index& known = shards_[at(members)];
    if (known >= 0) return known;
    for (known = options_.collective_unit;; known += options_.collective_unit) {
      std::vector<int> ids;
      for (int i = 0; at(i) < extents_.size(); ++i) {
        if ((members >> i & 1) != 0) ids.push_back(i);
      }
      do {
        if (keeps_equal_together && !has_equal_together(ids)) continue;
        if (fits(ids, known)) return known;
      } while (std::next_permutation(ids.begin(), ids.end()));
    }
  }

  bool is_equal(int a, int b) const {
    return extents_[at(a)].numel == extents_[at(b)].numel && extents_[at(a)].block == extents_[at(b)].block;
  }

  bool has_equal_together(const std::vector<int>& ids) const {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      for (std::size_t j = i + 1; j < ids.size(); ++j) {
        if (is_equal(ids[i], ids[j]) && !is_equal(ids[i], ids[j - 1])) return false;
      }
    }
    return true;
  }

  // The earliest start is the best one (see PlanUniform's tests, which try all of them).
  bool fits(const std::vector<int>& ids, Index shard_size) const {
    Index cursor = 0;
    const Index end = shard_size * options_.world_size;
    for (int i : ids) {
      const Extent& tensor = extents_[at(i)];
      while (cursor + tensor.numel <= end && cuts_a_block(cursor, tensor, shard_size)) ++cursor;
      cursor += tensor.numel;
      if (cursor > end) return false;
    }
    return true;
  }

  static bool cuts_a_block(Index start, const Extent& tensor, Index shard_size) {
    for (Index border = (start / shard_size + 1) * shard_size; border < start + tensor.numel; border += shard_size) {
      if ((border - start) % tensor.block != 0) return true;
    }
    return false;
  }

  const std::vector<Extent>& extents_;
  const PlanOptions& options_;
  std::vector<Index> shards_;
};

Index cost_of(const BucketPlan& plan, const PlanReport& report, const PlanOptions& options) {
  const PlanCost& cost = options.cost;
  return plan.image_numel() + cost.uniform_segment * report.num_uniform_segments +
      cost.ragged_segment * report.num_ragged_segments + cost.ragged_block * report.ragged_blocks;
}

TEST(Partition, equals_the_exhaustive_search_on_small_instances) {
  constexpr std::uint64_t kSeed = 2411;
  Seeded random(kSeed);
  int num_split = 0;
  int num_ragged = 0;
  for (int trial = 0; trial < 2500; ++trial) {
    PlanOptions options{
        .world_size = static_cast<int>(random.pick(std::vector<Index>{1, 2, 3, 4, 7})),
        .collective_unit = random.pick(std::vector<Index>{1, 1, 2, 3}),
        .start_alignment = 1,
        .max_uniform_segments = static_cast<int>(random.between(1, 3)),
        .max_ragged_blocks = random.one_in(2) ? random.between(1, 6) : 0};
    options.cost = {random.between(0, 3), random.between(0, 3), random.between(0, 2)};
    std::vector<Extent> extents(at(random.between(1, 4)));
    for (Extent& extent : extents) {
      extent.numel = random.between(2, 70);
      extent.block = random.between(2, std::min<Index>(extent.numel, 11));
      if (random.one_in(3)) extent = extents[0].numel > 0 ? extents[0] : extent;
    }
    if (random.one_in(4)) extents.back().block = 1;
    const std::vector<ParamSpec> params = params_of(extents);
    PlanReport report;
    const BucketPlan plan = plan_bucket(params, options, &report);
    SCOPED_TRACE(fmt::format("seed {}, trial {}: {}", kSeed, trial, to_string(plan)));
    ASSERT_NO_THROW(validate(plan));
    expect_every_element_in_place(plan);
    const auto [any_order, equal_together] = Exhaustive(extents, options).cheapest();
    ASSERT_GE(cost_of(plan, report, options), any_order);
    ASSERT_LE(cost_of(plan, report, options), equal_together);
    ASSERT_TRUE(report.is_exact);
    ASSERT_LE(report.bound, plan.image_numel());
    num_split += report.num_uniform_segments > 1 ? 1 : 0;
    num_ragged += report.num_ragged_segments;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(num_split, 60);
  EXPECT_GT(num_ragged, 100);
}

TEST(Partition, makes_legal_plans_of_random_buckets) {
  constexpr std::uint64_t kSeed = 77;
  Seeded random(kSeed);
  for (int trial = 0; trial < 2500; ++trial) {
    const std::vector<ParamSpec> params = random_bucket(random);
    PlanOptions options = random_options(random);
    options.max_uniform_segments = static_cast<int>(random.between(1, 4));
    options.max_ragged_blocks = random.between(0, 40);
    options.cost = {random.between(0, 4), random.between(0, 4), random.between(0, 1)};
    options.order =
        random.pick(std::vector{PlanOrder::kAuto, PlanOrder::kModule, PlanOrder::kBlock, PlanOrder::kShape});
    options.flat_rows = random.one_in(3);
    options.first_owner = static_cast<int>(random.between(0, options.world_size - 1));
    SCOPED_TRACE(fmt::format("seed {}, trial {}", kSeed, trial));
    PlanReport report;
    const BucketPlan plan = plan_bucket(params, options, &report);
    ASSERT_NO_THROW(validate(plan)) << to_string(plan);
    expect_every_element_in_place(plan);
    EXPECT_EQ(plan_from_json(to_json(plan)), plan);
    EXPECT_EQ(report.image, plan.image_numel());
    EXPECT_EQ(report.padding(), plan.padding());
    EXPECT_EQ(report.uniform_bound, plan.lower_bound);
    EXPECT_LE(report.uniform_bound, report.uniform_only);
    EXPECT_LE(report.ragged_blocks, options.max_ragged_blocks);
    // What the report costs doesn't change the plan.
    EXPECT_EQ(plan_bucket(params, options), plan);
    PlanOptions single = options;
    single.strategy = PlanStrategy::kSingle;
    Index cost_of_single = options.cost.uniform_segment;
    const BucketPlan one = plan_bucket(params, single);
    cost_of_single *=
        static_cast<Index>(std::ranges::count_if(one.segments, [](const Segment& s) { return s.numel > 0; }));
    EXPECT_LE(cost_of(plan, report, options), one.image_numel() + cost_of_single);
    if (::testing::Test::HasFailure()) FAIL() << to_string(plan);
  }
}

// Two rows of 13 and of 7 elements a block: together in one segment their blocks force a multiple of
// 91 on the shard.
std::vector<ParamSpec> clash() {
  return {
      {.name = "a", .shape = {100, 13}, .block = 13},
      {.name = "b", .shape = {100, 7}, .block = 7},
      {.name = "c", .shape = {2, 17}, .block = 17},
      {.name = "norm", .shape = {16}}};
}

const PlanOptions kClash{.world_size = 10, .collective_unit = 1, .start_alignment = 1, .cost = {1, 1, 1}};

TEST(Partition, splits_tensors_whose_blocks_clash) {
  PlanReport report;
  const BucketPlan plan = plan_bucket(clash(), kClash, &report);
  validate(plan);
  EXPECT_GE(report.num_uniform_segments, 2);
  PlanOptions single = kClash;
  single.strategy = PlanStrategy::kSingle;
  PlanOptions paper = kClash;
  paper.strategy = PlanStrategy::kPaper;
  EXPECT_LT(plan.image_numel(), plan_bucket(clash(), single).image_numel());
  EXPECT_LE(plan_bucket(clash(), single).image_numel(), plan_bucket(clash(), paper).image_numel());
  EXPECT_EQ(plan_bucket(clash(), paper).segments.size(), 1u);
}

TEST(Partition, keeps_one_segment_where_another_costs_more_than_it_saves) {
  PlanOptions dear = kClash;
  dear.cost = {100'000, 100'000, 1000};
  EXPECT_EQ(plan_bucket(clash(), dear).segments.size(), 1u);
}

TEST(Partition, keeps_module_order_where_it_ties) {
  const std::vector<ParamSpec> params{
      {.name = "small", .shape = {8, 8}, .block = 8}, {.name = "large", .shape = {64, 8}, .block = 8}};
  const BucketPlan plan = plan_bucket(params, {.world_size = 4});
  ASSERT_EQ(plan.segments.size(), 1u);
  EXPECT_EQ(plan.segments[0].params, (std::vector<int>{0, 1}));
  EXPECT_EQ(plan.padding(), 0);
}

TEST(Partition, shares_the_limit_of_ragged_blocks_between_trainable_and_frozen) {
  std::vector<ParamSpec> params;
  for (const bool trainable : {true, false}) {
    params.push_back({.name = trainable ? "w" : "f", .shape = {70, 10}, .block = 10, .trainable = trainable});
    params.push_back({.name = trainable ? "x" : "g", .shape = {3, 91}, .block = 91, .trainable = trainable});
  }
  PlanOptions options{.world_size = 7, .collective_unit = 1, .start_alignment = 1, .cost = {1, 1, 1}};
  options.max_ragged_blocks = 3;
  BucketPlan plan = plan_bucket(params, options);
  validate(plan);
  const auto num_ragged = [&] {
    return std::ranges::count_if(plan.segments, [](const Segment& s) { return s.kind == SegmentKind::kRagged; });
  };
  EXPECT_EQ(num_ragged(), 1);
  EXPECT_EQ(plan.segments[1].kind, SegmentKind::kRagged);
  options.max_ragged_blocks = 6;
  plan = plan_bucket(params, options);
  validate(plan);
  EXPECT_EQ(num_ragged(), 2);
  EXPECT_EQ(plan.padding(), 0);
}

TEST(Partition, hands_tails_to_the_ranks_in_turn) {
  const std::vector<ParamSpec> params{
      {.name = "w", .shape = {70, 10}, .block = 10}, {.name = "x", .shape = {3, 91}, .block = 91}};
  const std::vector<std::vector<ParamSpec>> buckets(7, params);
  PlanOptions options{.world_size = 7, .collective_unit = 1, .start_alignment = 1, .cost = {1, 1, 1}};
  std::vector<PlanReport> reports;
  const std::vector<BucketPlan> plans = plan_buckets(buckets, options, &reports);
  std::vector<Index> owned(7, 0);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    validate(plans[i]);
    EXPECT_EQ(reports[i].ragged_blocks, 3);
    EXPECT_EQ(reports[i].image, plans[i].image_numel());
    for (int rank = 0; rank < 7; ++rank) owned[at(rank)] += plans[i].owned(1, rank).size();
  }
  // 21 blocks over 7 ranks, in windows of three that never wrap.
  EXPECT_LE(std::ranges::max(owned), 5 * 91);
  EXPECT_GE(std::ranges::min(owned), 91);
  options.first_owner = 4;
  EXPECT_EQ(plan_bucket(params, options).owned(1, 4), (Interval{0, 91}));
  options.first_owner = 5;  // too near to the end: from rank 0
  EXPECT_EQ(plan_bucket(params, options).owned(1, 0), (Interval{0, 91}));
}

TEST(Partition, is_refused_by_the_checker_once_a_border_moves) {
  const std::vector<ParamSpec> params{
      {.name = "w", .shape = {70, 10}, .block = 10}, {.name = "x", .shape = {3, 91}, .block = 91}};
  const PlanOptions options{.world_size = 7, .collective_unit = 1, .start_alignment = 1, .cost = {1, 1, 1}};
  const BucketPlan plan = plan_bucket(params, options);
  ASSERT_EQ(plan.segments.size(), 2u);
  ASSERT_EQ(plan.segments[1].kind, SegmentKind::kRagged);
  int num_borders = 0;
  for (std::size_t s = 0; s < plan.segments.size(); ++s) {
    for (int rank = 0; rank + 1 < plan.world_size; ++rank) {
      const std::vector<Interval>& owners = plan.segments[s].owners;
      if (owners[at(rank)].empty() || owners[at(rank)].end != owners[at(rank + 1)].begin) continue;
      for (const Index by : {-1, 1, 5}) {
        BucketPlan moved = plan;
        moved.segments[s].owners[at(rank)].end += by;
        moved.segments[s].owners[at(rank + 1)].begin += by;
        EXPECT_THROW(validate(moved), InvalidArgument) << "segment " << s << ", rank " << rank << ", by " << by;
      }
      ++num_borders;
    }
  }
  EXPECT_EQ(num_borders, 6 + 2);
  BucketPlan descending = plan;
  std::vector<Interval>& owners = descending.segments[1].owners;
  std::ranges::reverse(owners);
  EXPECT_INVALID(validate(descending), "owners in ascending order");
  BucketPlan elsewhere = plan;
  std::swap(elsewhere.segments[0], elsewhere.segments[1]);
  EXPECT_THROW(validate(elsewhere), InvalidArgument);
}

TEST(Partition, gives_every_rank_its_share_where_blocks_outnumber_ranks) {
  const std::vector<ParamSpec> params{{.name = "a", .shape = {9, 5}, .block = 5}, {.name = "b", .shape = {2, 5}}};
  PlanOptions options{.world_size = 3, .collective_unit = 1, .start_alignment = 1, .cost = {100, 0, 0}};
  const BucketPlan plan = plan_bucket(params, options);
  validate(plan);
  expect_every_element_in_place(plan);
  ASSERT_EQ(plan.segments.size(), 1u);
  EXPECT_EQ(plan.segments[0].kind, SegmentKind::kRagged);
  for (int rank = 0; rank < 3; ++rank) EXPECT_NEAR(static_cast<double>(plan.local_numel(rank)), 55.0 / 3, 5);
}

TEST(Partition, runs_blocks_over_the_rows_of_a_stack_when_told) {
  // Two and a half blocks a matrix.
  const std::vector<ParamSpec> params{{.name = "experts", .shape = {6, 5, 4}, .block = 8, .restart = 20}};
  PlanOptions options{.world_size = 5, .collective_unit = 4, .start_alignment = 4};
  EXPECT_GT(plan_bucket(params, options).padding(), 0);
  options.flat_rows = true;
  const BucketPlan plan = plan_bucket(params, options);
  EXPECT_EQ(plan.padding(), 0);
  EXPECT_EQ(plan.params[0].restart, 0);
  validate(plan);
}

TEST(Partition, takes_buckets_of_very_many_tensors) {
  const Inventory model = bundled_model("deepseek-v3-671b-perexpert");
  const std::vector<ParamSpec> params = param_specs(model.units[10], {.rows = 128});
  ASSERT_GT(params.size(), 700u);
  PlanReport report;
  const BucketPlan plan = plan_bucket(params, {.world_size = 512}, &report);
  validate(plan);
  EXPECT_FALSE(report.is_exact);
  EXPECT_LT(report.image, report.numel / 100 * 106);

  std::vector<ParamSpec> distinct;
  for (Index i = 0; i < 60; ++i) {
    distinct.push_back({.name = fmt::format("w{}", i), .shape = {700 + i, 1000 + i}, .block = 1000 + i});
  }
  const BucketPlan thinned = plan_bucket(distinct, {.world_size = 64}, &report);
  validate(thinned);
  EXPECT_FALSE(report.is_exact);
}

TEST(Partition, refuses_bad_options) {
  const std::vector<ParamSpec> params{{.name = "w", .shape = {4}}};
  EXPECT_INVALID(plan_bucket(params, {.max_uniform_segments = 0}), "1 to 16 uniform segments, but got 0");
  EXPECT_INVALID(plan_bucket(params, {.max_ragged_blocks = -1}), "a limit of 0 to 1048576 ragged blocks, but got -1");
  EXPECT_INVALID(plan_bucket(params, {.world_size = 2, .first_owner = 2}), "a first owner in [0, 2), but got 2");
  EXPECT_INVALID(plan_bucket(params, {.cost = {-1, 0, 0}}), "costs of 0 to");
}

}  // namespace
}  // namespace ragged::plan
