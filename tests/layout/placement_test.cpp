#include "ragged/layout/placement.h"

#include <numeric>
#include <unordered_set>

#include "tests/support/expect_error.h"
#include "tests/support/seeded.h"

namespace ragged::layout {
namespace {

using ::ragged::testing::Seeded;

using Shape = std::vector<Index>;
using Units = std::vector<Index>;

std::vector<Interval> all_intervals(const Shape& shape, const RaggedShard& placement) {
  std::vector<Interval> result;
  for (int rank = 0; rank < placement.world_size(); ++rank) {
    result.push_back(ragged_interval(shape, placement, rank));
  }
  return result;
}

TEST(RaggedShard, gives_ranks_consecutive_cells) {
  const RaggedShard placement(1, {2, 3});
  EXPECT_EQ(ragged_interval(Shape{5, 4}, placement, 0), (Interval{0, 8}));
  EXPECT_EQ(ragged_interval(Shape{5, 4}, placement, 1), (Interval{8, 20}));
  EXPECT_EQ(ragged_interval(Shape{10, 4}, placement, 1), (Interval{16, 40}));
}

TEST(RaggedShard, gives_ranks_of_no_units_nothing) {
  const RaggedShard placement(1, {0, 2, 0, 0, 1, 0});
  const std::vector<Interval> intervals = all_intervals(Shape{6, 5}, placement);
  EXPECT_EQ(intervals[1], (Interval{0, 20}));
  EXPECT_EQ(intervals[4], (Interval{20, 30}));
  for (std::size_t rank : {0u, 2u, 3u, 5u}) EXPECT_TRUE(intervals[rank].empty());
}

TEST(RaggedShard, cuts_as_fine_as_its_dims) {
  EXPECT_EQ(ragged_interval(Shape{2, 3, 4}, RaggedShard(2, {1, 5}), 0), (Interval{0, 4}));
  EXPECT_EQ(ragged_interval(Shape{2, 3, 4}, RaggedShard(3, {1, 23}), 0), (Interval{0, 1}));
  EXPECT_INVALID(ragged_interval(Shape{2, 3, 4}, RaggedShard(1, {1, 5}), 0), "2 cells");
}

TEST(RaggedShard, of_no_dims_has_one_owner) {
  for (int owner = 0; owner < 3; ++owner) {
    Units units(3, 0);
    units[static_cast<std::size_t>(owner)] = 7;
    const RaggedShard placement(0, units);
    for (const Shape& shape : {Shape{}, Shape{5}, Shape{3, 4}}) {
      for (int rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(ragged_interval(shape, placement, rank).size(), rank == owner ? checked_product(shape) : 0);
      }
    }
  }
}

TEST(RaggedShard, of_an_empty_tensor_has_no_units) {
  const RaggedShard placement(1, {0, 0, 0});
  for (const Shape& shape : {Shape{0}, Shape{0, 4}, Shape{4, 0}}) {
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(ragged_interval(shape, placement, rank), Interval{});
    }
  }
  EXPECT_INVALID(ragged_interval(Shape{3}, placement, 0), "all are zero");
}

TEST(RaggedShard, of_an_empty_tensor_takes_any_units) {
  EXPECT_EQ(ragged_interval(Shape{0, 4}, RaggedShard(1, {2, 3}), 1), Interval{});
  EXPECT_EQ(ragged_interval(Shape{5, 0}, RaggedShard(1, {2, 3}), 1), Interval{});
}

TEST(RaggedShard, divides_its_units_by_their_common_divisor) {
  EXPECT_EQ(RaggedShard(1, {4, 6, 0}), RaggedShard(1, {2, 3, 0}));
  EXPECT_EQ(RaggedShard(1, {4, 6, 0}).local_units(), (Units{2, 3, 0}));
  EXPECT_EQ(RaggedShard(0, {0, 9}).local_units(), (Units{0, 1}));
  EXPECT_EQ(RaggedShard(2, {0, 0}).local_units(), (Units{0, 0}));
  EXPECT_NE(RaggedShard(1, {2, 3}), RaggedShard(2, {2, 3}));
  EXPECT_NE(RaggedShard(1, {2, 3}), RaggedShard(1, {3, 2}));
}

TEST(RaggedShard, refuses_what_is_no_layout) {
  EXPECT_INVALID(RaggedShard(-1, {1}), "dims >= 0, but got -1");
  EXPECT_INVALID(RaggedShard(1, {}), "one local unit a rank");
  EXPECT_INVALID(RaggedShard(1, {1, -2}), "got -2 (rank 1 of 2)");
  EXPECT_INVALID(RaggedShard(0, {1, 1}), "exactly one non-zero unit");
  EXPECT_INVALID(RaggedShard(0, {0, 0}), "exactly one non-zero unit");
  constexpr Index kHuge = std::numeric_limits<Index>::max();
  EXPECT_INVALID(RaggedShard(1, {kHuge, kHuge}), "below 2^63");
}

TEST(RaggedShard, refuses_tensors_that_it_does_not_fit) {
  EXPECT_INVALID(ragged_interval(Shape{4, 4}, RaggedShard(1, {5, 3}), 0), "sum is 8");
  EXPECT_INVALID(ragged_interval(Shape{4}, RaggedShard(2, {1, 1}), 0), "dims=2");
  EXPECT_INVALID(ragged_interval(Shape{4}, RaggedShard(1, {1, 1}), 2), "a rank in [0, 2), but got 2");
  EXPECT_INVALID(ragged_interval(Shape{4}, RaggedShard(1, {1, 1}), -1), "got -1");
  EXPECT_INVALID(ragged_interval(Shape{-4}, RaggedShard(1, {1, 1}), 0), "got -4");
}

TEST(StridedRaggedShard, is_a_ragged_shard_with_a_split_factor) {
  const StridedRaggedShard placement(1, {2, 4}, 2);
  EXPECT_EQ(placement.ragged(), RaggedShard(1, {1, 2}));
  EXPECT_EQ(placement, StridedRaggedShard(1, {1, 2}, 2));
  EXPECT_NE(placement, StridedRaggedShard(1, {1, 2}, 3));
  EXPECT_INVALID(StridedRaggedShard(1, {1, 2}, 0), "split factor of at least 1, but got 0");
  EXPECT_INVALID(StridedRaggedShard(0, {1, 2}, 2), "one non-zero unit");
}

TEST(Placement, prints_itself) {
  EXPECT_EQ(to_string(Replicate{}), "Replicate()");
  EXPECT_EQ(to_string(Shard{1}), "Shard(dim=1)");
  EXPECT_EQ(to_string(Partial{}), "Partial(sum)");
  EXPECT_EQ(to_string(Partial{ReduceOp::kAvg}), "Partial(avg)");
  EXPECT_EQ(to_string(Partial{ReduceOp::kMax}), "Partial(max)");
  EXPECT_EQ(to_string(RaggedShard(1, {2, 3})), "RaggedShard(dims=1, units=[2, 3])");
  EXPECT_EQ(to_string(StridedRaggedShard(1, {2, 3}, 4)), "StridedRaggedShard(dims=1, units=[2, 3], split_factor=4)");
}

TEST(Placement, hashes_equal_when_equal_and_apart_when_not) {
  EXPECT_EQ(hash_value(RaggedShard(1, {4, 6})), hash_value(RaggedShard(1, {2, 3})));
  const std::vector<Placement> different{
      Replicate{},
      Shard{0},
      Shard{1},
      Partial{},
      Partial{ReduceOp::kAvg},
      RaggedShard(1, {2, 3}),
      RaggedShard(1, {3, 2}),
      RaggedShard(2, {2, 3}),
      RaggedShard(1, {2, 3, 0}),
      StridedRaggedShard(1, {2, 3}, 1),
      StridedRaggedShard(1, {2, 3}, 2)};
  std::unordered_set<std::size_t> hashes;
  for (std::size_t i = 0; i < different.size(); ++i) {
    hashes.insert(hash_value(different[i]));
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(different[i], different[j]);
  }
  EXPECT_EQ(hashes.size(), different.size());
}

TEST(RaggedFromIntervals, takes_the_shortest_prefix_that_every_cut_respects) {
  const Shape shape{4, 3, 2};
  EXPECT_EQ(ragged_from_intervals(shape, std::vector<Interval>{{0, 12}, {12, 24}}), RaggedShard(1, {1, 1}));
  EXPECT_EQ(ragged_from_intervals(shape, std::vector<Interval>{{0, 8}, {8, 24}}), RaggedShard(2, {1, 2}));
  EXPECT_EQ(ragged_from_intervals(shape, std::vector<Interval>{{0, 7}, {7, 24}}), RaggedShard(3, {7, 17}));
  EXPECT_EQ(ragged_from_intervals(shape, std::vector<Interval>{{0, 0}, {0, 24}}), RaggedShard(0, {0, 1}));
  EXPECT_EQ(ragged_from_intervals(Shape{}, std::vector<Interval>{{0, 1}}), RaggedShard(0, {1}));
}

TEST(RaggedFromIntervals, gives_an_empty_tensor_no_units) {
  EXPECT_EQ(ragged_from_intervals(Shape{0, 4}, std::vector<Interval>{{0, 0}, {0, 0}}), RaggedShard(1, {0, 0}));
  EXPECT_EQ(ragged_from_intervals(Shape{4, 0}, std::vector<Interval>(3)), RaggedShard(1, {0, 0, 0}));
}

TEST(RaggedFromIntervals, is_the_inverse_of_ragged_interval) {
  constexpr std::uint64_t kSeed = 11;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  Seeded random(kSeed);
  for (int trial = 0; trial < 3000; ++trial) {
    Shape shape(static_cast<std::size_t>(random.between(1, 4)));
    for (Index& size : shape) size = random.between(1, 6);
    const Index numel = checked_product(shape);
    // Cuts at multiples of a random suffix, some of them equal, so that some ranks are empty.
    const auto dims = static_cast<std::size_t>(random.between(0, static_cast<Index>(shape.size())));
    const Index row = checked_product(std::span<const Index>(shape).subspan(dims));
    const Index world_size = random.pick(std::vector<Index>{1, 2, 3, 4, 7});
    std::vector<Index> cuts{0, numel};
    for (Index i = 1; i < world_size; ++i) cuts.push_back(random.between(0, numel / row) * row);
    std::sort(cuts.begin(), cuts.end());
    std::vector<Interval> intervals;
    for (std::size_t i = 1; i < cuts.size(); ++i) intervals.push_back({cuts[i - 1], cuts[i]});

    const RaggedShard placement = ragged_from_intervals(shape, intervals);
    EXPECT_LE(placement.dims(), static_cast<int>(dims)) << "trial " << trial;
    ASSERT_EQ(all_intervals(shape, placement), intervals) << "trial " << trial;
  }
}

TEST(RaggedFromIntervals, steps_over_empty_intervals_wherever_they_claim_to_lie) {
  const std::vector<Interval> intervals{{9, 9}, {0, 3}, {0, 0}, {3, 6}};
  EXPECT_EQ(ragged_from_intervals(Shape{2, 3}, intervals), RaggedShard(1, {0, 1, 0, 1}));
}

TEST(RaggedFromIntervals, refuses_what_does_not_cover_the_tensor) {
  const Shape shape{2, 3};
  EXPECT_INVALID(ragged_from_intervals(shape, std::vector<Interval>{{0, 3}}), "they end at 3");
  EXPECT_INVALID(ragged_from_intervals(shape, std::vector<Interval>{{0, 3}, {4, 6}}), "where 3 was due");
  EXPECT_INVALID(ragged_from_intervals(shape, std::vector<Interval>{{3, 6}, {0, 3}}), "where 0 was due");
  EXPECT_INVALID(ragged_from_intervals(shape, std::vector<Interval>{{0, 9}}), "they end at 9");
  EXPECT_INVALID(ragged_from_intervals(Shape{0}, {}), "one local unit a rank");
}

TEST(ShardLocal, splits_as_chunk_does) {
  // Sizes and offsets of a dim of 5 over 4 ranks: ceil-sized pieces, the last rank empty.
  const std::vector<std::pair<Index, Index>> expected{{2, 0}, {2, 2}, {1, 4}, {0, 5}};
  for (int rank = 0; rank < 4; ++rank) {
    const LocalShard local = shard_local(Shape{5, 3}, 0, 4, rank);
    EXPECT_EQ(local.shape, (Shape{expected[static_cast<std::size_t>(rank)].first, 3}));
    EXPECT_EQ(local.offset, expected[static_cast<std::size_t>(rank)].second);
  }
}

TEST(ShardLocal, covers_every_size_once) {
  for (int world_size : {1, 2, 3, 4, 7}) {
    for (Index size : {0, 1, 2, 3, 5, 6, 7, 8, 13}) {
      Index cursor = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        const LocalShard local = shard_local(Shape{2, size}, 1, world_size, rank);
        EXPECT_EQ(local.offset, cursor);
        EXPECT_LE(local.shape[1], ceil_div(size, world_size));
        EXPECT_GE(local.shape[1], 0);
        cursor += local.shape[1];
      }
      EXPECT_EQ(cursor, size);
    }
  }
}

TEST(ShardLocal, refuses_bad_arguments) {
  EXPECT_INVALID(shard_local(Shape{5}, 1, 2, 0), "a dim in [0, 1)");
  EXPECT_INVALID(shard_local(Shape{5}, -1, 2, 0), "got -1");
  EXPECT_INVALID(shard_local(Shape{}, 0, 2, 0), "a dim in [0, 0)");
  EXPECT_INVALID(shard_local(Shape{5}, 0, 0, 0), "world size of at least 1");
  EXPECT_INVALID(shard_local(Shape{5}, 0, 2, 2), "a rank in [0, 2), but got 2");
  EXPECT_INVALID(shard_local(Shape{-5}, 0, 2, 0), "got -5");
}

TEST(RaiseBlockForShard, keeps_cuts_out_of_the_foreign_dim) {
  EXPECT_EQ(raise_block_for_shard(Shape{8, 6}, 5, 0), 5);
  EXPECT_EQ(raise_block_for_shard(Shape{8, 6}, 1, 1), 6);
  EXPECT_EQ(raise_block_for_shard(Shape{8, 6}, 4, 1), 12);
  EXPECT_EQ(raise_block_for_shard(Shape{8, 6}, 12, 1), 12);
  EXPECT_EQ(raise_block_for_shard(Shape{4, 3, 5}, 5, 1), 15);
  EXPECT_EQ(raise_block_for_shard(Shape{4, 3, 5}, 2, 2), 10);
}

TEST(RaiseBlockForShard, stops_at_the_whole_tensor) {
  EXPECT_EQ(raise_block_for_shard(Shape{3, 4}, 9, 1), 12);
  EXPECT_EQ(raise_block_for_shard(Shape{0, 4}, 3, 1), 3);
}

TEST(RaiseBlockForShard, refuses_bad_arguments) {
  EXPECT_INVALID(raise_block_for_shard(Shape{3, 4}, 0, 1), "a block of at least 1");
  EXPECT_INVALID(raise_block_for_shard(Shape{3, 4}, 1, 2), "a dim in [0, 2)");
  EXPECT_INVALID(raise_block_for_shard(Shape{3, 4}, 1, -1), "got -1");
}

}  // namespace
}  // namespace ragged::layout
