// What the collectives leave in memory: every byte of the image, its neighbours and the staging, against slow twins.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ragged/comm/scalar_type.h"
#include "ragged/comm/sum_in_rank_order.h"
#include "tests/comm/hand_plan.h"
#include "tests/comm/recorded.h"
#include "tests/support/expect_error.h"
#include "tests/support/ranks.h"

namespace ragged::test {
namespace {

using comm::Collectives;
using comm::Communicator;
using comm::ReduceScatter;
using plan::BucketPlan;
using plan::Interval;
using plan::Segment;
using plan::SegmentKind;

constexpr Index kMargin = 37;
constexpr int kWorlds[] = {1, 2, 3, 4, 7};
constexpr Index kThreshold = 16 << 10;  // bytes of a slice from which on two ranks of Gloo gather by broadcasts

at::Tensor normal(Index numel, std::uint64_t seed, at::ScalarType dtype) {
  return at::randn({numel}, at::detail::createCPUGenerator(seed), at::TensorOptions().dtype(at::kDouble)).to(dtype);
}

// Any bit pattern, NaNs included: a gather moves bytes.
at::Tensor any_bits(Index numel, std::uint64_t seed, at::ScalarType dtype) {
  const auto bytes = numel * static_cast<Index>(c10::elementSize(dtype));
  return at::randint(0, 256, {bytes}, at::detail::createCPUGenerator(seed), at::TensorOptions().dtype(at::kByte))
      .view(dtype);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() &&
      at::equal(a.contiguous().view(at::kByte), b.contiguous().view(at::kByte));
}

Communicator with(const Communicator& communicator, Collectives collectives) {
  if (communicator.size() == 1) return communicator;
  return Communicator(
      communicator.process_group(), communicator.device(), {.collectives = collectives},
      collectives == Collectives::kStock ? "stock" : "auto");
}

std::vector<BucketPlan> plans(int world_size, const std::vector<Index>& sizes) {
  std::vector<BucketPlan> made;
  for (const HandPlan& spec : awkward_plans(world_size, sizes)) made.push_back(make_hand_plan(spec));
  return made;
}

// Memory with margins around what is under test, so that a byte written outside is seen.
struct Guarded {
  Guarded(Index numel, at::ScalarType dtype)
      : whole(any_bits(numel + 2 * kMargin, 99, dtype)), part(whole.narrow(0, kMargin, numel)), before(whole.clone()) {}

  void expect_margins_untouched() const {
    const Index numel = part.numel();
    EXPECT_TRUE(same_bits(whole.narrow(0, 0, kMargin), before.narrow(0, 0, kMargin)));
    EXPECT_TRUE(same_bits(whole.narrow(0, kMargin + numel, kMargin), before.narrow(0, kMargin + numel, kMargin)));
  }

  at::Tensor whole, part, before;
};

enum class OwnPart { kInImage, kElsewhere };

void gathers(
    const Communicator& communicator, const BucketPlan& plan, at::ScalarType dtype, std::string_view unit,
    OwnPart where) {
  const at::Tensor truth = any_bits(plan.image_numel(), 5, dtype);
  Guarded image(plan.image_numel(), dtype);
  at::Tensor want = image.part.clone();
  std::vector<at::Tensor> own{truth.narrow(0, 0, 0)};
  for (const Segment& segment : plan.segments) {
    for (int r = 0; r < plan.world_size; ++r) {
      const Interval owned = segment.owners[static_cast<std::size_t>(r)];
      want.narrow(0, owned.begin, owned.size()).copy_(truth.narrow(0, owned.begin, owned.size()));
      if (r != communicator.rank()) continue;
      const at::Tensor mine = truth.narrow(0, owned.begin, owned.size());
      if (where == OwnPart::kInImage) {
        image.part.narrow(0, owned.begin, owned.size()).copy_(mine);
      } else {
        own.push_back(mine);
      }
    }
  }
  const at::Tensor parameter = image.part.variable_data();
  const auto version = image.part._version();
  const auto traffic = communicator.traffic();
  // Bytes that no arithmetic knows, fp8 for one, are put together as bytes.
  std::vector<at::Tensor> own_bytes;
  for (const at::Tensor& part : own) own_bytes.push_back(part.view(at::kByte));
  const at::Tensor elsewhere = at::cat(own_bytes).view(dtype);
  const at::Tensor elsewhere_before = elsewhere.clone();
  comm::Work work = where == OwnPart::kInImage ? communicator.all_gather(plan.segments, image.part, unit)
                                               : communicator.all_gather(plan.segments, image.part, unit, elsewhere);
  EXPECT_EQ(work.pending(), communicator.size() > 1);
  work.wait();
  EXPECT_FALSE(work.pending());
  work.wait();  // idempotent
  EXPECT_TRUE(same_bits(image.part, want));
  EXPECT_TRUE(same_bits(elsewhere, elsewhere_before));
  image.expect_margins_untouched();
  EXPECT_EQ(image.part._version(), version);
  EXPECT_EQ(parameter._version(), 0);
  auto expected = traffic;
  if (communicator.size() > 1) {
    expected.gathered_bytes += static_cast<Index>(image.part.nbytes());
    ++expected.all_gathers;
  }
  EXPECT_EQ(communicator.traffic(), expected);
}

TEST(AllGather, fills_the_image_and_nothing_else) {
  const std::vector<Index> sizes{0, 1, kThreshold / 4 - 1, kThreshold / 4, kThreshold / 4 + 1, 7919};
  for (const int world_size : kWorlds) {
    const std::vector<BucketPlan> all = plans(world_size, sizes);
    run_ranks(
        world_size,
        [&](comm::World& world) {
          for (const Collectives collectives : {Collectives::kAuto, Collectives::kStock}) {
            const Communicator communicator = with(world.all(), collectives);
            for (std::size_t i = 0; i < all.size(); ++i) {
              SCOPED_TRACE(fmt::format("world {} plan {} stock {}", world_size, i, communicator.is_stock()));
              gathers(communicator, all[i], at::kFloat, "unit", OwnPart::kInImage);
              if (communicator.takes_own_part(all[i].segments)) {
                gathers(communicator, all[i], at::kFloat, "unit", OwnPart::kElsewhere);
              }
            }
          }
        },
        quick());
  }
}

TEST(AllGather, moves_every_dtype) {
  for (const int world_size : {2, 3}) {
    const std::vector<BucketPlan> all = plans(world_size, {1, 13, kThreshold});
    run_ranks(
        world_size,
        [&](comm::World& world) {
          for (const Collectives collectives : {Collectives::kAuto, Collectives::kStock}) {
            const Communicator communicator = with(world.all(), collectives);
            for (const at::ScalarType dtype :
                 {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kByte, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
              for (const BucketPlan& plan : all) {
                SCOPED_TRACE(fmt::format("world {} {}", world_size, c10::toString(dtype)));
                gathers(communicator, plan, dtype, "unit", OwnPart::kInImage);
                if (communicator.takes_own_part(plan.segments)) {
                  gathers(communicator, plan, dtype, "unit", OwnPart::kElsewhere);
                }
              }
            }
          }
        },
        quick());
  }
}

// A ragged segment that starts at a middle rank, by numbers that can be read off.
TEST(AllGather, takes_ragged_owners_in_any_order) {
  const BucketPlan plan =
      make_hand_plan({.world_size = 3, .first_shard = 2, .second_shard = 1, .ragged = {2, 3, 1}, .first_owner = 1});
  EXPECT_EQ(plan.segments[2].owners, (std::vector<Interval>{{14, 15}, {9, 11}, {11, 14}}));
  run_ranks(
      3,
      [&](comm::World& world) {
        const at::Tensor image = at::full({15}, -1.0F);
        for (const auto& range : plan.ranges(world.rank())) {
          image.narrow(0, range.image_offset, range.length).fill_(world.rank());
        }
        world.all().all_gather(plan.segments, image, "unit").wait();
        const std::vector<float> want{0, 0, 1, 1, 2, 2, 0, 1, 2, 1, 1, 2, 2, 2, 0};
        EXPECT_TRUE(at::equal(image, at::tensor(want)));
      },
      quick());
}

// One broadcast for the only owner of the ragged segment, always; three ranks broadcast however small slices are.
TEST(AllGather, is_one_call_below_the_threshold_and_one_broadcast_an_owner_above) {
  for (const int world_size : {2, 3}) {
    const auto plan_of = [&](Index shard) {
      HandPlan spec{.world_size = world_size, .first_shard = shard, .second_shard = 0, .ragged = {0, 4}};
      spec.ragged.resize(static_cast<std::size_t>(world_size));
      return make_hand_plan(spec);
    };
    run_ranks(
        world_size,
        [&](comm::World& world) {
          const auto calls = [&](const Communicator& communicator, const BucketPlan& plan) {
            const at::Tensor image = at::zeros({plan.image_numel()});
            const Recorded recorded;
            communicator.all_gather(plan.segments, image, "unit").wait();
            return std::pair(recorded.count_c10d(), recorded.count("c10d::broadcast_"));
          };
          const std::pair<int, int> one_call{2, 1};
          const std::pair<int, int> broadcasts{world_size + 1, world_size + 1};
          EXPECT_EQ(calls(world.all(), plan_of(kThreshold / 4 - 1)), world_size == 2 ? one_call : broadcasts);
          EXPECT_EQ(calls(world.all(), plan_of(kThreshold / 4)), broadcasts);
          EXPECT_EQ(calls(with(world.all(), Collectives::kStock), plan_of(kThreshold / 4)), one_call);
        },
        quick());
  }
}

TEST(AllGather, reads_its_own_part_elsewhere_where_no_broadcast_would_need_a_copy) {
  const BucketPlan even = make_hand_plan({.world_size = 2, .first_shard = 3, .second_shard = 2, .ragged = {0, 0}});
  const BucketPlan ragged = make_hand_plan({.world_size = 2, .first_shard = 3, .second_shard = 2, .ragged = {0, 4}});
  const BucketPlan of_three =
      make_hand_plan({.world_size = 3, .first_shard = 3, .second_shard = 2, .ragged = {0, 0, 0}});
  EXPECT_FALSE(Communicator().takes_own_part(even.segments));
  for (const int world_size : {2, 3}) {
    run_ranks(
        world_size,
        [&](comm::World& world) {
          const Communicator stock = with(world.all(), Collectives::kStock);
          const BucketPlan& uniform = world_size == 2 ? even : of_three;
          EXPECT_TRUE(stock.takes_own_part(uniform.segments));
          EXPECT_EQ(world.all().takes_own_part(uniform.segments), world_size == 2);
          if (world_size == 3) return;
          EXPECT_FALSE(stock.takes_own_part(ragged.segments));
          EXPECT_TRUE(world.all().takes_own_part(ragged.segments));
        },
        quick());
  }
}

TEST(AllGather, moves_nothing_in_a_world_of_one) {
  const BucketPlan plan = make_hand_plan({.world_size = 1, .first_shard = 4, .second_shard = 2, .ragged = {3}});
  const Communicator alone;
  const at::Tensor image = at::arange(9, at::kFloat);
  const at::Tensor before = image.clone();
  EXPECT_FALSE(alone.all_gather(plan.segments, image, "unit").pending());
  EXPECT_TRUE(at::equal(image, before));
  EXPECT_FALSE(alone.all_reduce_sum(image, "unit").pending());
  EXPECT_FALSE(alone.all_reduce_max(image, "unit").pending());
  EXPECT_FALSE(alone.broadcast(image, 0, "unit").pending());
  alone.barrier();
  EXPECT_EQ(alone.traffic(), comm::Traffic{});
}

// --- reduce-scatter ---

struct Reduction {
  at::ScalarType from = at::kFloat;
  at::ScalarType to = at::kFloat;
  double scale = 1.0;
  bool accumulate = false;
};

std::string to_string(const Reduction& r) {
  return fmt::format(
      "{} to {} scale {} accumulate {}", c10::toString(r.from), c10::toString(r.to), r.scale, r.accumulate);
}

at::Tensor addend(const BucketPlan& plan, int rank, at::ScalarType dtype) {
  return normal(plan.image_numel(), static_cast<std::uint64_t>(rank) + 11, dtype);
}

// The twin: whole images, one rank after another, then this rank's ranges cut out.
at::Tensor reduced(const BucketPlan& plan, int rank, const Reduction& r, const at::Tensor& before) {
  const auto wide = r.from == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor sum = addend(plan, 0, r.from).to(wide);
  for (int k = 1; k < plan.world_size; ++k) sum = sum + addend(plan, k, r.from).to(wide);
  sum = sum * r.scale;
  std::vector<at::Tensor> ranges{at::empty({0}, wide)};
  for (const auto& range : plan.ranges(rank)) ranges.push_back(sum.narrow(0, range.image_offset, range.length));
  const at::Tensor mine = at::cat(ranges);
  return (r.accumulate ? before.to(wide) + mine : mine).to(r.to);
}

void reduces(const Communicator& communicator, const BucketPlan& plan, const Reduction& r) {
  SCOPED_TRACE(to_string(r));
  const int rank = communicator.rank();
  const at::Tensor image = addend(plan, rank, r.from);
  const at::Tensor image_before = image.clone();
  const auto image_version = image._version();
  Guarded shard(plan.local_numel(rank), r.to);
  shard.part.copy_(normal(plan.local_numel(rank), 77, r.to));
  const at::Tensor want = reduced(plan, rank, r, shard.part);
  ReduceScatter args{
      .segments = plan.segments,
      .image = image,
      .staging = {},
      .shard = shard.part,
      .scale = r.scale,
      .accumulate = r.accumulate};

  // Exactly what the routes need: all ranks' addends of what is summed here (of two ranks the other's alone, where it
  // can't go into the shard itself), one addend of what Gloo summed.
  Index needed = 0;
  for (const Segment& segment : plan.segments) {
    const Index owned = segment.owners[static_cast<std::size_t>(rank)].size();
    if (plan.world_size > 2 && (!communicator.is_stock() || segment.kind != SegmentKind::kUniform)) {
      needed += plan.world_size * owned;
    } else if (r.accumulate || r.from != r.to) {
      needed += owned;
    }
  }
  if (communicator.size() == 1) needed = 0;
  EXPECT_EQ(communicator.staging_numel(args), needed);
  Guarded staging(needed, r.from);
  if (needed > 0) args.staging = staging.part;

  const auto version = shard.part._version();
  auto traffic = communicator.traffic();
  comm::Work work = communicator.reduce_scatter(args, "unit");
  work.wait();
  work.wait();
  EXPECT_TRUE(same_bits(image, image_before));
  EXPECT_EQ(shard.part._version(), version);
  EXPECT_EQ(image._version(), image_version);
  shard.expect_margins_untouched();
  staging.expect_margins_untouched();
  if (!communicator.is_stock()) {
    EXPECT_TRUE(same_bits(shard.part, want)) << (shard.part.to(at::kDouble) - want.to(at::kDouble)).abs().max();
  } else if (want.numel() > 0) {
    const double norm = want.to(at::kDouble).norm().item<double>();
    const double difference = (shard.part.to(at::kDouble) - want.to(at::kDouble)).norm().item<double>();
    const double tolerance = r.from == at::kBFloat16 || r.to == at::kBFloat16 ? 2e-2 : 1e-6;
    EXPECT_LE(difference, tolerance * norm);
  }
  if (communicator.size() > 1) {
    traffic.reduced_bytes += static_cast<Index>(image.nbytes());
    ++traffic.reduce_scatters;
  }
  EXPECT_EQ(communicator.traffic(), traffic);
}

const std::vector<Reduction> kReductions{
    {},
    {.scale = 1.0 / 3},
    {.scale = 1.0 / 3, .accumulate = true},
    {.from = at::kBFloat16, .to = at::kFloat},
    {.from = at::kBFloat16, .to = at::kFloat, .scale = 0.25, .accumulate = true},
    {.from = at::kBFloat16, .to = at::kBFloat16, .scale = 1.0 / 3}};

TEST(ReduceScatter, equals_its_slow_twin_bit_for_bit) {
  for (const int world_size : kWorlds) {
    const std::vector<BucketPlan> all = plans(world_size, {0, 1, 1023, 1024, 1025, 7919});
    run_ranks(
        world_size,
        [&](comm::World& world) {
          for (std::size_t i = 0; i < all.size(); ++i) {
            SCOPED_TRACE(fmt::format("world {} plan {}", world_size, i));
            for (const Reduction& r : kReductions) reduces(world.all(), all[i], r);
          }
        },
        quick());
  }
}

TEST(ReduceScatter, holds_in_half_and_double_precision) {
  const BucketPlan plan =
      make_hand_plan({.world_size = 3, .first_shard = 100, .second_shard = 1, .ragged = {4, 0, 9}, .first_owner = 1});
  run_ranks(
      3,
      [&](comm::World& world) {
        reduces(world.all(), plan, {.from = at::kDouble, .to = at::kDouble, .scale = 1.0 / 3, .accumulate = true});
        reduces(world.all(), plan, {.from = at::kDouble, .to = at::kFloat});
        reduces(world.all(), plan, {.from = at::kHalf, .to = at::kFloat, .scale = 1.0 / 3});
        reduces(world.all(), plan, {.from = at::kFloat, .to = at::kHalf});
      },
      quick());
}

TEST(ReduceScatter, comes_close_to_its_twin_on_the_stock_route) {
  for (const int world_size : {1, 2, 3, 4}) {
    const std::vector<BucketPlan> all = plans(world_size, {0, 1, 1025});
    run_ranks(
        world_size,
        [&](comm::World& world) {
          const Communicator stock = with(world.all(), Collectives::kStock);
          for (const BucketPlan& plan : all) {
            for (const Reduction& r : kReductions) reduces(stock, plan, r);
          }
        },
        quick());
  }
}

TEST(ReduceScatter, takes_a_prefix_of_the_segments) {
  const BucketPlan plan =
      make_hand_plan({.world_size = 2, .first_shard = 3, .second_shard = 2, .ragged = {1, 5}, .first_owner = 1});
  run_ranks(
      2,
      [&](comm::World& world) {
        const at::Tensor image = at::full({10}, 1.0F + static_cast<float>(world.rank()));
        const at::Tensor shard = at::full({5}, -1.0F);
        ReduceScatter args{
            .segments = std::span(plan.segments).first(2), .image = image, .staging = {}, .shard = shard};
        EXPECT_EQ(world.all().staging_numel(args), 0);
        const auto holders = shard.storage().use_count();
        world.all().reduce_scatter(args, "unit").wait();
        // Whatever Gloo's thread still holds: the shard's memory is its owner's alone.
        EXPECT_EQ(shard.storage().use_count(), holders);
        EXPECT_TRUE(at::equal(shard, at::full({5}, 3.0F)));
      },
      quick());
}

TEST(ReduceScatter, issues_one_call_a_uniform_segment) {
  const BucketPlan plan =
      make_hand_plan({.world_size = 3, .first_shard = 3, .second_shard = 2, .ragged = {1, 5, 2}, .first_owner = 1});
  run_ranks(
      3,
      [&](comm::World& world) {
        const at::Tensor image = at::ones({plan.image_numel()});
        const at::Tensor shard = at::zeros({plan.local_numel(world.rank())});
        for (const Collectives collectives : {Collectives::kAuto, Collectives::kStock}) {
          const Communicator communicator = with(world.all(), collectives);
          ReduceScatter args{.segments = plan.segments, .image = image, .staging = {}, .shard = shard};
          args.staging = at::empty({communicator.staging_numel(args)});
          const Recorded recorded;
          communicator.reduce_scatter(args, "unit").wait();
          // The ragged segment goes round once: two ascending runs.
          EXPECT_EQ(recorded.count_c10d(), 4) << testing::PrintToString(recorded.all());
          EXPECT_EQ(recorded.count("c10d::alltoall_base_"), communicator.is_stock() ? 2 : 4);
        }
      },
      quick());
}

// --- the sum alone ---

TEST(SumInRankOrder, equals_a_loop_at_every_size_around_a_tile) {
  for (const Index numel : {0, 1, 2, 1023, 1024, 1025, 2047, 2048, 2049, 7919, 100003}) {
    for (const int num_ranks : {1, 2, 3, 7}) {
      for (const bool accumulate : {false, true}) {
        const at::Tensor addends = normal(numel * num_ranks, 3, at::kFloat);
        const at::Tensor out = normal(numel, 4, at::kFloat);
        std::vector<float> want(static_cast<std::size_t>(numel));
        const float* a = addends.const_data_ptr<float>();
        const float scale = 1.0F / 3.0F;
        for (Index i = 0; i < numel; ++i) {
          float sum = a[i];
          for (int r = 1; r < num_ranks; ++r) sum = sum + a[r * numel + i];
          sum = sum * scale;
          want[static_cast<std::size_t>(i)] = accumulate ? out.const_data_ptr<float>()[i] + sum : sum;
        }
        comm::sum_in_rank_order(addends, num_ranks, out, {.scale = 1.0 / 3.0, .accumulate = accumulate});
        EXPECT_TRUE(same_bits(out, at::tensor(want))) << numel << " of " << num_ranks;
      }
    }
  }
}

TEST(SumInRankOrder, takes_addends_from_anywhere_and_writes_over_one) {
  for (const Index numel : {0, 1, 1023, 1025, 7919}) {
    for (const int num_ranks : {1, 2, 3, 7}) {
      for (int over = 0; over < num_ranks; ++over) {
        const at::Tensor together = normal(numel * num_ranks, 3, at::kFloat);
        const at::Tensor want = at::empty({numel});
        comm::sum_in_rank_order(together, num_ranks, want, {.scale = 0.7});
        std::vector<at::Tensor> addends;
        for (const at::Tensor& addend : together.view({num_ranks, numel}).unbind(0)) addends.push_back(addend.clone());
        const at::Tensor out = addends[static_cast<std::size_t>(over)];
        comm::sum_in_rank_order(addends, out, {.scale = 0.7});
        EXPECT_TRUE(same_bits(out, want)) << numel << " of " << num_ranks << " over " << over;
      }
    }
  }
}

TEST(SumInRankOrder, rounds_once_when_addends_are_bfloat16) {
  // In bf16 steps 256 + 1 would stay 256; in fp32 the ones add up.
  const at::Tensor addends = at::tensor(std::vector<float>{256, 1, 1, 1}).to(at::kBFloat16);
  const at::Tensor wide = at::empty({1});
  comm::sum_in_rank_order(addends, 4, wide, {});
  EXPECT_EQ(wide.item<float>(), 259.0F);
  const at::Tensor narrow = at::empty({1}, at::kBFloat16);
  comm::sum_in_rank_order(addends, 4, narrow, {});
  EXPECT_EQ(narrow.item<float>(), 260.0F);  // 259 rounded to even
}

TEST(SumInRankOrder, refuses_addends_of_another_number) {
  EXPECT_THROW(comm::sum_in_rank_order(at::zeros({5}), 2, at::zeros({2}), {}), InternalError);
  EXPECT_THROW(comm::sum_in_rank_order(std::vector<at::Tensor>{}, at::zeros({2}), {}), InternalError);
  EXPECT_THROW(comm::sum_in_rank_order(std::vector{at::zeros({2}), at::zeros({3})}, at::zeros({2}), {}), InternalError);
}

// --- the rest ---

TEST(AllReduce, sums_and_takes_the_largest_in_place) {
  for (const int world_size : {2, 3, 4}) {
    run_ranks(
        world_size,
        [&](comm::World& world) {
          const Communicator& all = world.all();
          const auto rank = static_cast<float>(world.rank());
          const at::Tensor values = at::tensor(std::vector<float>{rank, -rank, 1.0F});
          const auto n = static_cast<float>(world_size);
          all.all_reduce_sum(values, "unit").wait();
          EXPECT_TRUE(at::equal(values, at::tensor(std::vector<float>{n * (n - 1) / 2, -n * (n - 1) / 2, n})));
          const at::Tensor largest = at::tensor(std::vector<float>{rank, -rank, 1.0F});
          all.all_reduce_max(largest, "unit").wait();
          EXPECT_TRUE(at::equal(largest, at::tensor(std::vector<float>{n - 1, 0.0F, 1.0F})));
          EXPECT_EQ(values._version(), 0);
          const at::Tensor wide = at::full({1}, 1e300, at::kDouble);
          all.all_reduce_sum(wide, "unit").wait();
          EXPECT_EQ(wide.item<double>(), 1e300 * world_size);
          comm::Traffic want;
          want.all_reduces = 3;
          want.all_reduced_bytes = 12 + 12 + 8;
          EXPECT_EQ(all.traffic(), want);
          EXPECT_GT(all.wait_seconds(), 0.0);
          all.barrier();
          EXPECT_EQ(all.traffic().all_reduces, 4);
        },
        quick());
  }
}

TEST(Broadcast, comes_from_its_root_in_every_dtype) {
  run_ranks(
      3,
      [&](comm::World& world) {
        for (int root = 0; root < 3; ++root) {
          for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kByte, at::kFloat8_e4m3fn, at::kLong}) {
            const at::Tensor truth = any_bits(101, 8, dtype);
            Guarded image(101, dtype);
            if (world.rank() == root) image.part.copy_(truth);
            const auto version = image.part._version();
            world.all().broadcast(image.part, root, "unit").wait();
            EXPECT_TRUE(same_bits(image.part, truth));
            EXPECT_EQ(image.part._version(), version);
            image.expect_margins_untouched();
          }
        }
        EXPECT_EQ(world.all().traffic().others, 15);
        EXPECT_EQ(world.all().traffic().other_bytes, 3 * 101 * (4 + 2 + 1 + 1 + 8));
      },
      quick());
}

// Copies share counters, groups don't; several operations may run at once.
TEST(Communicator, runs_operations_side_by_side) {
  run_ranks(
      3,
      [&](comm::World& world) {
        const BucketPlan plan =
            make_hand_plan({.world_size = 3, .first_shard = 2, .second_shard = 5000, .ragged = {2, 3, 1}});
        const Communicator copy = world.all();
        const at::Tensor image = at::zeros({plan.image_numel()});
        for (const auto& range : plan.ranges(world.rank()))
          image.narrow(0, range.image_offset, range.length).fill_(1.0);
        const at::Tensor addends = at::ones({plan.image_numel()});
        const at::Tensor shard = at::zeros({plan.local_numel(world.rank())});
        ReduceScatter args{.segments = plan.segments, .image = addends, .staging = {}, .shard = shard};
        args.staging = at::empty({copy.staging_numel(args)});
        comm::Work gather = world.all().all_gather(plan.segments, image, "a");
        comm::Work reduce = copy.reduce_scatter(args, "b");
        const at::Tensor flags = at::ones({4});
        comm::Work flag = copy.all_reduce_max(flags, "c");
        comm::Work same = reduce;
        flag.wait();
        reduce.wait();
        same.wait();  // the sum is formed once
        gather.wait();
        EXPECT_TRUE(at::equal(image, at::ones_like(image)));
        EXPECT_TRUE(at::equal(shard, at::full_like(shard, 3.0)));
        EXPECT_EQ(world.all().traffic(), copy.traffic());
        EXPECT_EQ(copy.traffic().all_gathers + copy.traffic().reduce_scatters + copy.traffic().all_reduces, 3);
      },
      quick());
}

TEST(ScalarType, goes_both_ways) {
  for (const DType dtype :
       {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2,
        DType::kUInt8}) {
    EXPECT_EQ(comm::to_dtype(comm::to_scalar_type(dtype)), dtype);
  }
  EXPECT_EQ(comm::to_scalar_type(DType::kBFloat16), at::kBFloat16);
  EXPECT_INVALID(comm::to_dtype(at::kLong), "but got Long");
  EXPECT_INVALID(comm::to_dtype(at::kComplexFloat), "Expected a floating-point type or uint8");
}

}  // namespace
}  // namespace ragged::test
