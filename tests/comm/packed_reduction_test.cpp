// Several reductions as one: the bits of each by itself.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ragged/base/error.h"
#include "ragged/comm/world.h"
#include "tests/support/ranks.h"

namespace ragged::test {
namespace {

using comm::PackedReduceScatter;
using comm::ReduceScatter;

// Uniform buckets of these sizes a rank; the addend of each rank is its own.
struct Bucket {
  std::vector<plan::Segment> segments;
  at::Tensor image;
};

Bucket bucket_of(int world_size, Index shard_size, int rank, at::ScalarType dtype) {
  plan::Segment segment;
  segment.numel = world_size * shard_size;
  segment.shard_size = shard_size;
  for (int r = 0; r < world_size; ++r) segment.owners.push_back({r * shard_size, (r + 1) * shard_size});
  at::Tensor image = at::arange(segment.numel, at::kFloat).add(1.0).reciprocal().mul(rank + 1.7).to(dtype);
  return {{segment}, image};
}

void expect_the_bits_of_each(comm::World& world, at::ScalarType from, at::ScalarType to) {
  const int size = world.size();
  const std::vector<Index> shard_sizes{5, 0, 1031, 1};
  const std::vector<double> scales{1.0, 0.3, 0.5, 1.0 / 3.0};
  const std::vector<char> accumulates{false, false, true, true};
  std::vector<Bucket> buckets;
  Index mine = 0;
  for (const Index shard_size : shard_sizes) {
    buckets.push_back(bucket_of(size, shard_size, world.rank(), from));
    mine += shard_size;
  }
  PackedReduceScatter args;
  std::vector<at::Tensor> runs;
  const auto run_of = [&](int rank) {
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      runs.push_back(buckets[b].image.narrow(0, rank * shard_sizes[b], shard_sizes[b]));
    }
  };
  for (int rank = 0; rank < size; ++rank) {
    if (rank != world.rank()) run_of(rank);
  }
  run_of(world.rank());
  const std::vector<Index> counts(static_cast<std::size_t>(size), mine);
  args.packed = at::cat(runs);
  args.counts = counts;
  args.staging = at::empty({(size - 1) * mine}, from);
  args.bytes = 123;
  std::vector<at::Tensor> want;
  Index offset = 0;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    want.push_back(at::full({shard_sizes[b]}, 0.1, to));
    ReduceScatter alone{
        .segments = buckets[b].segments,
        .image = buckets[b].image,
        .staging = {},
        .shard = want.back(),
        .scale = scales[b],
        .accumulate = accumulates[b] != 0};
    alone.staging = at::empty({world.all().staging_numel(alone)}, from);
    world.all().reduce_scatter(alone, "alone").wait();
    args.parts.push_back(
        {.offset = offset,
         .shard = at::full({shard_sizes[b]}, 0.1, to),
         .scale = scales[b],
         .accumulate = accumulates[b] != 0});
    offset += shard_sizes[b];
  }
  const comm::Traffic before = world.all().traffic();
  comm::Work work = world.all().reduce_scatter(args, "together");
  comm::Work copy = work;
  copy.wait();
  work.wait();  // the sums were made, and are made once
  for (std::size_t b = 0; b < buckets.size(); ++b) EXPECT_TRUE(at::equal(args.parts[b].shard, want[b])) << b;
  EXPECT_EQ(world.all().traffic().reduced_bytes - before.reduced_bytes, 123);
  EXPECT_EQ(world.all().traffic().reduce_scatters - before.reduce_scatters, 1);
}

TEST(PackedReduceScatter, has_the_bits_of_each_reduction_by_itself) {
  for (const int world_size : {2, 3, 4, 7}) {
    run_ranks(
        world_size,
        [](comm::World& world) {
          expect_the_bits_of_each(world, at::kFloat, at::kFloat);
          expect_the_bits_of_each(world, at::kBFloat16, at::kFloat);
          expect_the_bits_of_each(world, at::kBFloat16, at::kBFloat16);
        },
        quick());
  }
}

TEST(PackedReduceScatter, keeps_memory_until_it_was_waited_for) {
  run_ranks(
      2,
      [](comm::World& world) {
        const std::vector<Index> counts{1, 1};
        auto memory = std::make_shared<int>(0);
        PackedReduceScatter args{
            .packed = at::ones({2}),
            .counts = counts,
            .staging = at::empty({1}),
            .parts = {{.offset = 0, .shard = at::empty({1})}},
            .memory = memory};
        comm::Work work = world.all().reduce_scatter(args, "unit");
        comm::Work copy = work;
        args.memory = nullptr;
        EXPECT_EQ(memory.use_count(), 2);
        work.wait();
        EXPECT_EQ(memory.use_count(), 1) << "a copy that nobody waited for keeps nothing";
        EXPECT_EQ(args.parts[0].shard.item<float>(), 2.0F);
      },
      quick());
}

TEST(Work, copies_of_one_that_failed_fail_too) {
  comm::WorldOptions options = quick();
  options.comm.deadline = std::chrono::milliseconds(300);
  std::vector<std::string> messages;
  const auto wait = [&](comm::Work& work) {
    try {
      work.wait();
    } catch (const CommError& error) {
      messages.emplace_back(error.what());
    }
  };
  // The group is dead from then on, so that the barrier at the end of run_ranks fails on either rank.
  const auto one_comes = [&](comm::World& world) {
    if (world.rank() != 0) return;
    comm::Work work = world.all().all_reduce_sum(at::zeros({2}), "lonely");
    comm::Work copy = work;
    wait(work);
    wait(copy);
  };
  EXPECT_THROW(run_ranks(2, one_comes, options), CommError);
  ASSERT_EQ(messages.size(), 2U);
  EXPECT_EQ(messages[0], messages[1]);
}

}  // namespace
}  // namespace ragged::test
