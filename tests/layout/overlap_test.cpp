#include "ragged/layout/overlap.h"

#include "tests/support/expect_error.h"
#include "tests/support/seeded.h"

namespace ragged::layout {
namespace {

using ::ragged::testing::Seeded;

// Every pair, in the order of position: the slow twin.
std::vector<Overlap> all_pairs(const std::vector<Interval>& from, const std::vector<Interval>& to) {
  std::vector<Overlap> result;
  for (std::size_t i = 0; i < from.size(); ++i) {
    for (std::size_t j = 0; j < to.size(); ++j) {
      const Interval common = intersect(from[i], to[j]);
      if (!common.empty()) result.push_back({static_cast<int>(i), static_cast<int>(j), common});
    }
  }
  std::sort(result.begin(), result.end(), [](const Overlap& a, const Overlap& b) {
    return a.interval.begin < b.interval.begin;
  });
  return result;
}

std::vector<Interval> random_intervals(Seeded& random) {
  std::vector<Interval> result(static_cast<std::size_t>(random.between(0, 7)));
  Index cursor = 0;
  for (Interval& interval : result) {
    if (random.one_in(3)) {
      const Index anywhere = random.between(0, 40);
      interval = {anywhere, anywhere - random.between(0, 1)};
      continue;
    }
    const Index begin = cursor + (random.one_in(2) ? 0 : random.between(0, 4));
    interval = {begin, begin + random.between(1, 9)};
    cursor = interval.end;
  }
  return result;
}

TEST(Overlaps, are_the_parts_that_change_hands) {
  const std::vector<Interval> from{{0, 6}, {6, 6}, {6, 12}};
  const std::vector<Interval> to{{0, 4}, {4, 8}, {8, 12}};
  const std::vector<Overlap> expected{{0, 0, {0, 4}}, {0, 1, {4, 6}}, {2, 1, {6, 8}}, {2, 2, {8, 12}}};
  EXPECT_EQ(overlaps(from, to), expected);
}

TEST(Overlaps, of_equal_layouts_stay_in_place) {
  const std::vector<Interval> layout{{0, 5}, {5, 5}, {5, 7}};
  EXPECT_EQ(overlaps(layout, layout), (std::vector<Overlap>{{0, 0, {0, 5}}, {2, 2, {5, 7}}}));
}

TEST(Overlaps, of_nothing_are_none) {
  EXPECT_TRUE(overlaps({}, {}).empty());
  EXPECT_TRUE(overlaps(std::vector<Interval>{{0, 5}}, {}).empty());
  EXPECT_TRUE(overlaps(std::vector<Interval>{{0, 0}, {0, 0}}, std::vector<Interval>{{0, 5}}).empty());
}

TEST(Overlaps, step_over_empty_intervals_wherever_they_claim_to_lie) {
  const std::vector<Interval> from{{99, 99}, {0, 4}, {0, 0}, {4, 6}};
  const std::vector<Interval> to{{50, 50}, {0, 6}, {-3, -3}};
  EXPECT_EQ(overlaps(from, to), (std::vector<Overlap>{{1, 1, {0, 4}}, {3, 1, {4, 6}}}));
}

TEST(Overlaps, equal_all_pairs_on_random_layouts) {
  constexpr std::uint64_t kSeed = 42;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  Seeded random(kSeed);
  for (int trial = 0; trial < 5000; ++trial) {
    const std::vector<Interval> from = random_intervals(random);
    const std::vector<Interval> to = random_intervals(random);
    ASSERT_EQ(overlaps(from, to), all_pairs(from, to)) << "trial " << trial;
  }
}

TEST(Overlaps, refuse_lists_that_do_not_ascend) {
  const std::vector<Interval> good{{0, 4}, {4, 8}};
  const std::vector<Interval> descending{{4, 8}, {0, 4}};
  const std::vector<Interval> overlapping{{0, 5}, {4, 8}};
  EXPECT_INVALID(overlaps(descending, good), "in 'from', but got [0, 4) on rank 1");
  EXPECT_INVALID(overlaps(good, overlapping), "in 'to', but got [4, 8) on rank 1");
}

}  // namespace
}  // namespace ragged::layout
