// The shard size of one uniform segment: known answers, and thousands of small cases against a
// search that knows nothing but the rules.
#include "ragged/plan/planner.h"
#include "tests/support/expect_error.h"
#include "tests/support/seeded.h"

namespace ragged::plan {
namespace {

using ::ragged::testing::Seeded;

struct Problem {
  std::vector<Extent> tensors;
  int world_size = 1;
  Index collective_unit = 1;
  Index start_alignment = 1;
};

std::string describe(const Problem& problem) {
  std::string text;
  for (const Extent& tensor : problem.tensors) text += fmt::format("({},{})", tensor.numel, tensor.block);
  return fmt::format(
      "{} ranks {} unit {} alignment {}", text, problem.world_size, problem.collective_unit, problem.start_alignment);
}

UniformLayout exact(const Problem& p) {
  return plan_uniform(p.tensors, p.world_size, p.collective_unit, p.start_alignment);
}

UniformLayout paper(const Problem& p) {
  return plan_uniform_paper(p.tensors, p.world_size, p.collective_unit, p.start_alignment);
}

bool cuts_no_block(Index start, const Extent& tensor, Index shard_size) {
  for (Index element = 1; element < tensor.numel; ++element) {
    const bool is_border = (start + element) % shard_size == 0;
    if (is_border && element % tensor.block != 0) return false;
  }
  return true;
}

// Whether there are any starts in this order, by trying all of them.
bool fits_somehow(const Problem& problem, Index shard_size) {
  const Index image = problem.world_size * shard_size;
  std::vector<bool> is_end(static_cast<std::size_t>(image) + 1, false);
  is_end[0] = true;
  for (const Extent& tensor : problem.tensors) {
    if (tensor.numel == 0) continue;
    std::vector<bool> next(is_end.size(), false);
    bool has_room = false;
    for (Index start = 0; start + tensor.numel <= image; ++start) {
      has_room = has_room || is_end[static_cast<std::size_t>(start)];
      const bool is_legal =
          has_room && start % problem.start_alignment == 0 && cuts_no_block(start, tensor, shard_size);
      if (is_legal) next[static_cast<std::size_t>(start + tensor.numel)] = true;
    }
    is_end = std::move(next);
  }
  return std::find(is_end.begin(), is_end.end(), true) != is_end.end();
}

Index total(const std::vector<Extent>& tensors) {
  Index sum = 0;
  for (const Extent& tensor : tensors) sum += tensor.numel;
  return sum;
}

// Every shard size from the smallest that holds the elements, one after the other.
Index exhaustive(const Problem& problem) {
  Index shard_size = round_up(ceil_div(total(problem.tensors), problem.world_size), problem.collective_unit);
  if (shard_size == 0) return 0;
  while (!fits_somehow(problem, shard_size)) shard_size += problem.collective_unit;
  return shard_size;
}

void expect_legal(const Problem& problem, const UniformLayout& layout) {
  ASSERT_EQ(layout.starts.size(), problem.tensors.size());
  EXPECT_EQ(layout.shard_size % problem.collective_unit, 0);
  Index cursor = 0;
  for (std::size_t i = 0; i < layout.starts.size(); ++i) {
    EXPECT_EQ(layout.starts[i] % problem.start_alignment, 0);
    EXPECT_GE(layout.starts[i], cursor);
    if (layout.shard_size > 0) {
      EXPECT_TRUE(cuts_no_block(layout.starts[i], problem.tensors[i], layout.shard_size)) << "tensor " << i;
    }
    cursor = layout.starts[i] + problem.tensors[i].numel;
  }
  EXPECT_LE(cursor, problem.world_size * layout.shard_size);
}

Problem random_problem(Seeded& random, Index most_tensors, Index largest) {
  Problem problem;
  problem.world_size = static_cast<int>(random.pick(std::vector<Index>{1, 2, 3, 4, 5, 7}));
  problem.collective_unit = random.pick(std::vector<Index>{1, 1, 2, 3, 4, 6, 8});
  const std::vector<Index> alignments{1, 2, 3, 4, 6, 8};
  do {
    problem.start_alignment = random.pick(alignments);
  } while (problem.collective_unit % problem.start_alignment != 0);
  problem.tensors.resize(static_cast<std::size_t>(random.between(1, most_tensors)));
  for (Extent& tensor : problem.tensors) {
    tensor.numel = random.one_in(12) ? 0 : random.between(1, largest);
    if (tensor.numel == 0) continue;
    tensor.block =
        random.one_in(4) ? random.between(1, tensor.numel) : random.between(1, std::min<Index>(tensor.numel, 9));
  }
  return problem;
}

struct Known {
  Problem problem;
  Index shard_size;
  std::vector<Index> starts;
};

const std::vector<Known>& known_answers() {
  static const std::vector<Known> known{
      {{{{24, 4}, {10, 5}, {18, 6}, {7, 1}}, 4, 2}, 18, {2, 26, 36, 54}},
      {{{{4, 1}, {3, 1}, {2, 1}}, 2, 1}, 5, {0, 4, 7}},
      {{{{16, 4}, {12, 4}, {8, 4}}, 2, 1}, 20, {0, 16, 28}},
      {{{{44, 11}, {10, 10}}, 3, 1}, 22, {0, 44}},
      {{{{12, 4}, {3, 3}}, 5, 1}, 4, {0, 12}},
      {{{{5, 5}, {5, 5}, {4, 4}}, 2, 1}, 9, {0, 9, 14}},
      {{{{1000, 32}, {96, 32}, {7, 1}}, 4, 8}, 288, {0, 1000, 1096}},
      {{{{507, 13}, {56, 7}, {30, 5}}, 24, 1}, 39, {0, 511, 570}},
      {{{{119, 11}, {47, 3}, {88, 11}, {54, 6}}, 10, 3}, 33, {0, 120, 176, 267}},
      {{{{74, 4}, {65, 5}, {171, 9}}, 7, 1}, 45, {1, 75, 144}},
  };
  return known;
}

TEST(PlanUniform, finds_the_known_shard_sizes_and_starts) {
  for (const Known& known : known_answers()) {
    SCOPED_TRACE(describe(known.problem));
    const UniformLayout layout = exact(known.problem);
    EXPECT_EQ(layout.shard_size, known.shard_size);
    EXPECT_EQ(layout.starts, known.starts);
    expect_legal(known.problem, layout);
  }
}

TEST(PlanUniform, beats_the_paper_where_the_blocks_of_no_prefix_fit) {
  const Problem problem = known_answers().back().problem;
  EXPECT_EQ(paper(problem).shard_size, 54);
  EXPECT_EQ(exact(problem).shard_size, 45);
}

TEST(PlanUniform, equals_the_exhaustive_search_on_small_instances) {
  constexpr std::uint64_t kSeed = 1602;
  Seeded random(kSeed);
  int num_improved = 0;
  for (int trial = 0; trial < 6000; ++trial) {
    const Problem problem = random_problem(random, 5, 24);
    SCOPED_TRACE(fmt::format("seed {}, trial {}: {}", kSeed, trial, describe(problem)));
    const UniformLayout layout = exact(problem);
    expect_legal(problem, layout);
    ASSERT_EQ(layout.shard_size, exhaustive(problem));

    const UniformLayout by_paper = paper(problem);
    expect_legal(problem, by_paper);
    ASSERT_GE(by_paper.shard_size, layout.shard_size);
    ASSERT_LE(by_paper.shard_size, 2 * layout.shard_size);
    num_improved += by_paper.shard_size > layout.shard_size ? 1 : 0;

    ASSERT_LE(shard_size_lower_bound(problem.tensors, problem.world_size, problem.collective_unit), layout.shard_size);
  }
  RecordProperty("instances_better_than_the_paper", num_improved);
}

TEST(PlanUniform, equals_the_exhaustive_search_on_long_tensors_over_many_ranks) {
  constexpr std::uint64_t kSeed = 22437;
  Seeded random(kSeed);
  for (int trial = 0; trial < 400; ++trial) {
    Problem problem = random_problem(random, 4, 150);
    problem.world_size = static_cast<int>(random.between(5, 16));
    SCOPED_TRACE(fmt::format("seed {}, trial {}: {}", kSeed, trial, describe(problem)));
    const UniformLayout layout = exact(problem);
    expect_legal(problem, layout);
    ASSERT_EQ(layout.shard_size, exhaustive(problem));
    ASSERT_LE(paper(problem).shard_size, 2 * layout.shard_size);
  }
}

TEST(PlanUniform, starts_every_tensor_as_early_as_is_legal) {
  constexpr std::uint64_t kSeed = 5;
  Seeded random(kSeed);
  for (int trial = 0; trial < 1000; ++trial) {
    const Problem problem = random_problem(random, 5, 24);
    SCOPED_TRACE(fmt::format("seed {}, trial {}: {}", kSeed, trial, describe(problem)));
    const UniformLayout layout = exact(problem);
    if (layout.shard_size == 0) continue;
    Index cursor = 0;
    for (std::size_t i = 0; i < layout.starts.size(); ++i) {
      for (Index start = cursor; start < layout.starts[i]; ++start) {
        const bool is_legal =
            start % problem.start_alignment == 0 && cuts_no_block(start, problem.tensors[i], layout.shard_size);
        ASSERT_FALSE(is_legal) << "tensor " << i << " at " << start;
      }
      if (problem.tensors[i].numel > 0) cursor = layout.starts[i] + problem.tensors[i].numel;
    }
  }
}

TEST(PlanUniform, handles_sizes_around_a_block_in_every_world) {
  constexpr Index kBlock = 8;
  for (int world_size : {1, 2, 3, 4, 7}) {
    for (Index numel : {Index{0}, Index{1}, kBlock - 1, kBlock, kBlock + 1, Index{97}}) {
      const Index block = std::clamp<Index>(numel, 1, kBlock);
      for (Index alignment : {1, 4}) {
        const Problem problem{{{numel, block}, {numel, 1}, {13, 13}}, world_size, 4, alignment};
        SCOPED_TRACE(describe(problem));
        const UniformLayout layout = exact(problem);
        expect_legal(problem, layout);
        EXPECT_EQ(layout.shard_size, exhaustive(problem));
      }
    }
  }
}

TEST(PlanUniform, of_nothing_has_a_shard_of_zero) {
  EXPECT_EQ(exact({{}, 4, 8, 8}).shard_size, 0);
  const UniformLayout layout = exact({{{0, 1}, {0, 5}}, 4, 8, 8});
  EXPECT_EQ(layout.shard_size, 0);
  EXPECT_EQ(layout.starts, (std::vector<Index>{0, 0}));
}

TEST(PlanUniform, gives_an_empty_tensor_a_place_but_no_room) {
  const UniformLayout layout = exact({{{3, 1}, {0, 1}, {5, 1}, {0, 1}}, 2, 4, 4});
  EXPECT_EQ(layout.shard_size, 8);
  EXPECT_EQ(layout.starts, (std::vector<Index>{0, 4, 4, 12}));
}

TEST(PlanUniform, takes_many_distinct_blocks) {
  // 600 blocks with few common divisors: no run-away of their multiples.
  Problem problem{{}, 128, 8, 8};
  for (Index i = 0; i < 600; ++i) problem.tensors.push_back({(1000 + i) * (700 + i), 1000 + i});
  const UniformLayout layout = exact(problem);
  expect_legal(
      {{problem.tensors.begin(), problem.tensors.begin() + 3}, 128, 8, 8},
      {layout.shard_size, {layout.starts.begin(), layout.starts.begin() + 3}});
  EXPECT_LE(layout.shard_size, paper(problem).shard_size);
  EXPECT_GE(layout.shard_size, shard_size_lower_bound(problem.tensors, 128, 8));
}

TEST(PlanUniform, refuses_bad_arguments) {
  EXPECT_INVALID(exact({{{4, 1}}, 0, 1, 1}), "world size of at least 1, but got 0");
  EXPECT_INVALID(exact({{{4, 1}}, 2, 0, 1}), "collective unit of at least 1, but got 0");
  EXPECT_INVALID(exact({{{4, 1}}, 2, 8, 3}), "divides the collective unit 8, but got 3");
  EXPECT_INVALID(exact({{{4, 1}}, 2, 8, 0}), "start alignment");
  EXPECT_INVALID(exact({{{4, 1}, {-1, 1}}, 2, 1, 1}), "got -1 (tensor 1)");
  EXPECT_INVALID(exact({{{4, 5}}, 2, 1, 1}), "1 to 4 elements, but got 5 (tensor 0)");
  EXPECT_INVALID(exact({{{4, 0}}, 2, 1, 1}), "got 0 (tensor 0)");
  EXPECT_INVALID(paper({{{4, 5}}, 2, 1, 1}), "(tensor 0)");
  EXPECT_INVALID(shard_size_lower_bound(std::vector<Extent>{{4, 5}}, 2, 1), "(tensor 0)");
}

TEST(PlanUniform, refuses_more_elements_than_can_be_counted) {
  constexpr Index kHuge = Index{1} << 61;
  EXPECT_INVALID(exact({{{kHuge, 1}, {kHuge, 1}}, 2, 1, 1}), "Make the bucket smaller");
  EXPECT_INVALID(exact({{{4, 1}}, 2, kHuge, 1}), "collective unit of at most");
}

TEST(ShardSizeLowerBound, counts_blocks_and_not_just_elements) {
  // Three blocks of 10 on two ranks: some rank holds two.
  EXPECT_EQ(shard_size_lower_bound(std::vector<Extent>{{30, 10}}, 2, 1), 20);
  EXPECT_EQ(shard_size_lower_bound(std::vector<Extent>{{30, 10}}, 2, 8), 24);
  // A rank below 12 holds one of these, so five need five ranks.
  EXPECT_EQ(shard_size_lower_bound(std::vector<Extent>{{6, 6}, {7, 7}, {6, 6}, {7, 7}, {6, 6}}, 4, 1), 12);
  EXPECT_EQ(shard_size_lower_bound(std::vector<Extent>{{100, 100}, {1, 1}}, 7, 1), 100);
  EXPECT_EQ(shard_size_lower_bound({}, 7, 8), 0);
}

}  // namespace
}  // namespace ragged::plan
