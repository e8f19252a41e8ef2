// The uneven all-to-all: every element of every run against what its sender holds, and nothing else touched.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/comm/recorded.h"
#include "tests/support/expect_error.h"
#include "tests/support/ranks.h"
#include "tests/support/seeded.h"

namespace ragged::test {
namespace {

using comm::Communicator;
using Counts = std::vector<std::vector<Index>>;  // [sender][receiver]

Counts random_counts(int world_size, std::uint64_t seed) {
  ::ragged::testing::Seeded random(seed);
  Counts counts(static_cast<std::size_t>(world_size), std::vector<Index>(static_cast<std::size_t>(world_size), 0));
  for (auto& row : counts) {
    for (Index& count : row) count = random.one_in(3) ? 0 : random.between(1, 137);
  }
  return counts;
}

// Element i that `from` sends to `to`: no two are equal in fp64.
double element(int from, int to, Index i) {
  return 1e6 * from + 1e3 * to + static_cast<double>(i);
}

at::Tensor run(int from, int to, Index count, at::ScalarType dtype) {
  at::Tensor values = at::empty({count}, at::kDouble);
  for (Index i = 0; i < count; ++i) values[i].fill_(element(from, to, i));
  return values.to(dtype);
}

at::Tensor joined(const std::vector<at::Tensor>& runs, at::ScalarType dtype) {
  return runs.empty() ? at::empty({0}, dtype) : at::cat(runs);
}

void exchanges(const Communicator& communicator, const Counts& counts, at::ScalarType dtype) {
  const int me = communicator.rank();
  const auto size = static_cast<std::size_t>(communicator.size());
  std::vector<at::Tensor> sent, wanted;
  std::vector<Index> send_counts, receive_counts;
  for (std::size_t r = 0; r < size; ++r) {
    send_counts.push_back(counts[static_cast<std::size_t>(me)][r]);
    receive_counts.push_back(counts[r][static_cast<std::size_t>(me)]);
    sent.push_back(run(me, static_cast<int>(r), send_counts.back(), dtype));
    wanted.push_back(run(static_cast<int>(r), me, receive_counts.back(), dtype));
  }
  const at::Tensor send = joined(sent, dtype);
  const at::Tensor want = joined(wanted, dtype);
  const at::Tensor before = send.clone();
  const at::Tensor around = at::zeros({want.numel() + 2}, dtype);  // a margin each side
  const at::Tensor receive = around.narrow(0, 1, want.numel());
  comm::Traffic traffic = communicator.traffic();
  comm::Work work = communicator.all_to_all(send, receive, send_counts, receive_counts, "unit");
  EXPECT_EQ(work.pending(), size > 1);
  work.wait();
  work.wait();  // idempotent
  EXPECT_TRUE(at::equal(receive, want));
  EXPECT_TRUE(at::equal(send, before));
  EXPECT_EQ(around[0].item<double>(), 0.0);
  EXPECT_EQ(around[want.numel() + 1].item<double>(), 0.0);
  if (size > 1) {
    traffic.all_to_all_bytes += (send.numel() - send_counts[static_cast<std::size_t>(me)]) * send.element_size();
    ++traffic.all_to_alls;
  }
  EXPECT_EQ(communicator.traffic(), traffic);
}

TEST(AllToAll, takes_uneven_and_zero_counts_of_every_dtype) {
  for (const int world_size : {1, 2, 3, 4, 7}) {
    run_ranks(
        world_size,
        [&](comm::World& world) {
          for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble, at::kLong, at::kHalf}) {
            for (std::uint64_t seed = 1; seed <= 4; ++seed) {
              SCOPED_TRACE(fmt::format("world {} seed {} {}", world_size, seed, c10::toString(dtype)));
              exchanges(world.all(), random_counts(world_size, seed), dtype);
            }
          }
        },
        quick());
  }
}

// All to one, one to all, nothing at all: ranks with empty tensors take part.
TEST(AllToAll, lets_ranks_give_or_take_nothing) {
  run_ranks(
      3,
      [&](comm::World& world) {
        exchanges(world.all(), {{0, 5, 0}, {0, 0, 0}, {0, 3, 0}}, at::kBFloat16);
        exchanges(world.all(), {{4, 0, 7}, {0, 0, 0}, {0, 0, 0}}, at::kFloat);
        exchanges(world.all(), {{0, 0, 0}, {0, 0, 0}, {0, 0, 0}}, at::kFloat);
      },
      quick());
}

TEST(AllToAll, is_one_call_and_may_overlap_others) {
  run_ranks(
      3,
      [&](comm::World& world) {
        const Communicator& all = world.all();
        const std::vector<Index> ones(3, 1);
        const at::Tensor first = at::full({3}, world.rank());
        const at::Tensor second = first + 10;
        const at::Tensor got_first = at::empty_like(first);
        const at::Tensor got_second = at::empty_like(second);
        const Recorded recorded;
        comm::Work a = all.all_to_all(first, got_first, ones, ones, "a");
        comm::Work b = all.all_to_all(second, got_second, ones, ones, "b");
        b.wait();
        a.wait();
        EXPECT_EQ(recorded.count_c10d(), 2);
        EXPECT_EQ(recorded.count("ragged::all_to_all a"), 1);
        EXPECT_TRUE(at::equal(got_first, at::arange(3, first.options())));
        EXPECT_TRUE(at::equal(got_second, at::arange(3, first.options()) + 10));
        EXPECT_EQ(got_first._version(), 0);
      },
      quick());
}

TEST(AllToAll, refuses_counts_that_do_not_fit) {
  const Communicator alone;
  const at::Tensor three = at::zeros({3});
  const std::vector<Index> fits{3};
  EXPECT_INVALID(alone.all_to_all(three, three, std::vector<Index>{2}, fits, "u"), "to send that sum to 3 elements");
  EXPECT_INVALID(alone.all_to_all(three, three, fits, std::vector<Index>{4}, "u"), "1 that sum to 4");
  EXPECT_INVALID(alone.all_to_all(three, three, std::vector<Index>{3, 0}, fits, "u"), "Expected 1 counts");
  EXPECT_INVALID(alone.all_to_all(three, three, std::vector<Index>{-3}, fits, "u"), "at least 0, but got -3");
  EXPECT_INVALID(alone.all_to_all(three.view({3, 1}), three, fits, fits, "u"), "contiguous 1-D");
  EXPECT_INVALID(alone.all_to_all(at::zeros({6}).slice(0, 0, 6, 2), three, fits, fits, "u"), "contiguous 1-D");
  EXPECT_INVALID(alone.all_to_all(three, three.to(at::kDouble), fits, fits, "u"), "one dtype");
}

TEST(AllToAll, takes_part_in_the_order_check) {
  comm::WorldOptions options = quick();
  options.comm.check_order = true;
  EXPECT_THAT(
      [&] {
        run_ranks(
            2,
            [&](comm::World& world) {
              EXPECT_TRUE(world.all().checks_order());
              const std::vector<Index> ones(2, 1);
              const at::Tensor values = at::zeros({2});
              const at::Tensor got = at::zeros({2});
              world.all().all_to_all(values, got, ones, ones, "same").wait();
              world.all().all_to_all(values, got, ones, ones, world.rank() == 0 ? "this" : "that").wait();
            },
            options);
      },
      ::testing::ThrowsMessage<CommError>(::testing::HasSubstr("all_to_all 'that'")));
}

TEST(AllToAll, gives_up_after_the_deadline) {
  comm::WorldOptions options = quick();
  options.comm.deadline = std::chrono::milliseconds(300);
  std::string message;
  // The group is dead from then on, so that the barrier at the end of run_ranks fails on either rank.
  EXPECT_THROW(
      run_ranks(
          2,
          [&](comm::World& world) {
            if (world.rank() != 0) return;
            const std::vector<Index> ones(2, 1);
            const at::Tensor values = at::zeros({2});
            try {
              world.all().all_to_all(values, at::zeros({2}), ones, ones, "lonely").wait();
            } catch (const CommError& error) {
              message = error.what();
            }
          },
          options),
      CommError);
  EXPECT_THAT(message, ::testing::AllOf(::testing::HasSubstr("[all_to_all]"), ::testing::HasSubstr("unit 'lonely'")));
}

}  // namespace
}  // namespace ragged::test
