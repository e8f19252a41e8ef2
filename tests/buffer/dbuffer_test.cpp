// DBuffer executes a plan to the element: on plans of two uniform segments and a ragged one, against whole images.
#include "ragged/buffer/dbuffer.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ragged/base/error.h"
#include "ragged/comm/compat.h"
#include "tests/comm/hand_plan.h"
#include "tests/support/ranks.h"

namespace ragged::test {
namespace {

using buffer::BufferPool;
using buffer::ByteCounters;
using buffer::DBuffer;
using buffer::DBufferSpec;
using buffer::Form;
using buffer::Slot;
using buffer::SlotUse;
using layout::Interval;
using plan::BucketPlan;
using testing::HasSubstr;
using testing::ThrowsMessage;

const c10::Device kCpu(c10::kCPU);
constexpr int kWorlds[] = {1, 2, 3, 4, 7};

std::shared_ptr<const BucketPlan> share(BucketPlan plan) {
  return std::make_shared<const BucketPlan>(std::move(plan));
}

// Owners of the ragged segment start at a middle rank.
HandPlan rotated(int world_size) {
  HandPlan spec{
      .world_size = world_size,
      .first_shard = 5,
      .second_shard = 3,
      .first_owner = world_size / 2,
      .start_alignment = 4};
  for (int r = 0; r < world_size; ++r) spec.ragged.push_back(r % 3 == 2 ? 0 : 2 * r + 3);
  return spec;
}

at::Tensor normal(Index numel, std::uint64_t seed, at::ScalarType dtype = at::kFloat) {
  return at::randn({numel}, at::detail::createCPUGenerator(seed), at::TensorOptions()).to(dtype);
}

DBufferSpec spec_of(
    std::shared_ptr<const BucketPlan> plan, int rank, at::ScalarType dtype = at::kFloat, int num_segments = -1) {
  const int world_size = plan->world_size;
  return {
      .unit = "layers.3",
      .mesh = layout::Mesh::shard(world_size),
      .plan = std::move(plan),
      .num_segments = num_segments,
      .rank = rank,
      .dtype = dtype,
      .device = kCpu};
}

Slot slot_for(const DBuffer& buffer) {
  const auto pool = BufferPool::create(buffer::default_allocator(), kCpu, nullptr);
  Slot slot = pool->take(pool->add_class(SlotUse::kImage, buffer.nbytes()), buffer.nbytes());
  if (buffer.nbytes() > 0) std::memset(slot.data(), 0xFF, static_cast<std::size_t>(buffer.nbytes()));  // NaNs
  return slot;
}

// This rank's ranges of a whole image, concatenated.
at::Tensor cut(const BucketPlan& plan, int rank, const at::Tensor& image, int num_segments = -1) {
  std::vector<at::Tensor> ranges{at::empty({0}, image.options())};
  for (const auto& range : plan.ranges(rank)) {
    if (num_segments >= 0 && static_cast<int>(ranges.size()) > num_segments) break;
    ranges.push_back(image.narrow(0, range.image_offset, range.length));
  }
  return at::cat(ranges);
}

std::vector<char> owned_mask(const BucketPlan& plan, int rank) {
  std::vector<char> mask(static_cast<std::size_t>(plan.image_numel()), 0);
  for (const auto& range : plan.ranges(rank)) {
    std::fill_n(mask.begin() + range.image_offset, range.length, 1);
  }
  return mask;
}

TEST(DBuffer, views_lie_where_the_plan_says) {
  for (const int world_size : kWorlds) {
    const auto plan = share(make_hand_plan(rotated(world_size)));
    for (const Form form : {Form::kReplicated, Form::kPartial}) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        DBuffer buffer(spec_of(plan, 0, dtype), form);
        EXPECT_EQ(buffer.numel(), plan->image_numel());
        EXPECT_EQ(buffer.form(), form);
        EXPECT_FALSE(buffer.is_resident());
        std::vector<at::Tensor> before;
        for (int i = 0; i < 5; ++i) before.push_back(buffer.tensor(i));
        buffer.attach(slot_for(buffer));
        EXPECT_TRUE(buffer.is_resident());
        const char* image = static_cast<const char*>(buffer.flat().const_data_ptr());
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(image) % buffer::BufferAllocator::kAlignment, 0U);
        for (int i = 0; i < 5; ++i) {
          const auto p = static_cast<std::size_t>(i);
          const at::Tensor tensor = buffer.tensor(i);
          EXPECT_TRUE(tensor.is_same(before[p]));  // one tensor for life
          EXPECT_EQ(tensor.sizes(), at::IntArrayRef(plan->params[p].shape));
          if (tensor.numel() == 0) continue;
          EXPECT_EQ(
              static_cast<const char*>(tensor.const_data_ptr()),
              image + plan->starts[p] * static_cast<Index>(c10::elementSize(dtype)))
              << plan->params[p].name;
        }
        const Slot slot = buffer.detach();
        EXPECT_TRUE(slot);
        EXPECT_EQ(slot.data(), image);
        EXPECT_FALSE(buffer.is_resident());
      }
    }
  }
}

TEST(DBuffer, sharded_views_are_pieces_of_one_allocation) {
  for (const int world_size : kWorlds) {
    const auto plan = share(make_hand_plan(rotated(world_size)));
    for (int rank = 0; rank < world_size; ++rank) {
      DBuffer shard(spec_of(plan, rank), Form::kSharded);
      EXPECT_EQ(shard.numel(), plan->local_numel(rank));
      EXPECT_FALSE(shard.is_resident());
      const at::Tensor truth = normal(plan->image_numel(), 1);
      const at::Tensor flat = cut(*plan, rank, truth);
      shard.adopt(flat);
      EXPECT_TRUE(shard.is_resident());
      EXPECT_TRUE(shard.flat().is_same(flat));
      for (int i = 0; i < 5; ++i) {
        const Interval owned = plan->owned(i, rank);
        const at::Tensor piece = shard.tensor(i);
        EXPECT_TRUE(
            at::equal(piece, truth.narrow(0, plan->starts[static_cast<std::size_t>(i)] + owned.begin, owned.size())));
        EXPECT_EQ(piece.storage().data(), flat.storage().data());
      }
      shard.adopt({});
      EXPECT_FALSE(shard.is_resident());
    }
  }
}

TEST(DBuffer, adopts_nothing_of_another_size_dtype_or_shape) {
  const auto plan = share(make_hand_plan(rotated(2)));
  DBuffer shard(spec_of(plan, 0), Form::kSharded);
  const Index numel = shard.numel();
  EXPECT_THROW(shard.adopt(at::zeros({numel + 1})), InternalError);
  EXPECT_THROW(shard.adopt(at::zeros({numel}, at::kDouble)), InternalError);
  EXPECT_THROW(shard.adopt(at::zeros({numel, 1})), InternalError);
  EXPECT_THROW(shard.adopt(at::zeros({2 * numel}).slice(0, 0, 2 * numel, 2)), InternalError);
  DBuffer image(spec_of(plan, 0), Form::kReplicated);
  EXPECT_THROW(image.adopt(at::zeros({image.numel()})), InternalError);
  EXPECT_THROW(shard.attach({}), InternalError);
}

TEST(DBuffer, cast_touches_own_ranges_and_gathering_makes_the_whole) {
  for (const int world_size : kWorlds) {
    const auto plan = share(make_hand_plan(rotated(world_size)));
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      run_ranks(
          world_size,
          [&](comm::World& world) {
            const at::Tensor truth = normal(plan->image_numel(), 2);
            DBuffer masters(spec_of(plan, world.rank()), Form::kSharded);
            masters.adopt(cut(*plan, world.rank(), truth));
            DBuffer image(spec_of(plan, world.rank(), dtype), Form::kReplicated);
            image.attach(slot_for(image));
            const at::Tensor parameter = image.tensor(2).variable_data();
            ByteCounters counters;
            image.cast_from(masters, counters);

            const std::vector<char> owned = owned_mask(*plan, world.rank());
            for (Index i = 0; i < image.numel(); ++i) {
              const at::Tensor element = image.flat()[i];
              if (owned[static_cast<std::size_t>(i)]) {
                EXPECT_TRUE(at::equal(element, truth[i].to(dtype))) << i;
              } else {
                EXPECT_TRUE(element.isnan().item<bool>()) << i;
              }
            }
            ByteCounters want;
            want.cast_in = plan->local_numel(world.rank()) * static_cast<Index>(c10::elementSize(dtype));
            EXPECT_EQ(counters, want);

            image.all_gather(world.all()).wait();
            for (int i = 0; i < 5; ++i) {
              const at::Tensor tensor = image.tensor(i);
              const at::Tensor whole = truth.narrow(0, plan->starts[static_cast<std::size_t>(i)], tensor.numel());
              EXPECT_TRUE(at::equal(tensor, whole.to(dtype).view(tensor.sizes())));
              EXPECT_EQ(tensor._version(), 0);
            }
            EXPECT_EQ(parameter._version(), 0);
            EXPECT_EQ(image.flat()._version(), 0);
            EXPECT_EQ(counters, want);  // the gather copies nothing
          },
          quick());
    }
  }
}

TEST(DBuffer, reduce_scatter_equals_a_slow_twin) {
  for (const int world_size : kWorlds) {
    const auto plan = share(make_hand_plan(rotated(world_size)));
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const int num_segments : {-1, 2, 1, 0}) {
        const Index image_numel = num_segments < 0 ? plan->image_numel() : plan->image_numel(num_segments);
        std::vector<at::Tensor> addends;
        for (int r = 0; r < world_size; ++r)
          addends.push_back(normal(image_numel, static_cast<std::uint64_t>(r) + 5, dtype));
        at::Tensor sum = addends[0].to(at::kFloat);
        for (int r = 1; r < world_size; ++r) sum = sum + addends[static_cast<std::size_t>(r)].to(at::kFloat);
        sum = sum * (1.0 / world_size);
        run_ranks(
            world_size,
            [&](comm::World& world) {
              const int rank = world.rank();
              DBuffer partial(spec_of(plan, rank, dtype, num_segments), Form::kPartial);
              EXPECT_EQ(partial.numel(), image_numel);
              partial.attach(slot_for(partial));
              partial.flat().copy_(addends[static_cast<std::size_t>(rank)]);
              DBuffer shard(spec_of(plan, rank, at::kFloat, num_segments), Form::kSharded);
              const at::Tensor want = cut(*plan, rank, sum, num_segments);
              EXPECT_EQ(shard.numel(), want.numel());
              const DBuffer::ReduceOptions options{.scale = 1.0 / world_size};
              // Asked for before the shard has bytes, as when slots are sized.
              const Index staging_numel = partial.staging_numel(world.all(), shard, options);
              // Two ranks receive where the sum will be, unless they mustn't overwrite it or its elements are wider.
              const Index slices = world_size > 2 ? world_size : world_size == 2 && dtype != at::kFloat ? 1 : 0;
              EXPECT_EQ(staging_numel, slices * want.numel());
              at::Tensor staging = at::empty({staging_numel}, dtype);
              shard.adopt(at::full({want.numel()}, std::nanf("")));
              partial.reduce_scatter(world.all(), shard, staging, options).wait();
              EXPECT_TRUE(at::equal(shard.flat(), want));
              // A second micro-batch adds.
              staging = at::empty({partial.staging_numel(world.all(), shard, {.accumulate = true})}, dtype);
              partial.reduce_scatter(world.all(), shard, staging, {.scale = 1.0 / world_size, .accumulate = true})
                  .wait();
              EXPECT_TRUE(at::equal(shard.flat(), want + want));
            },
            quick());
      }
    }
  }
}

TEST(DBuffer, all_reduce_sums_replicas_of_a_shard) {
  const auto plan = share(make_hand_plan(rotated(2)));
  run_ranks(
      4,
      [&](comm::World& world) {
        const comm::MeshGroups groups = world.groups(layout::Mesh::hybrid(2, 2));
        DBufferSpec spec = spec_of(plan, groups.shard.rank());
        spec.mesh = groups.mesh;
        DBuffer shard(spec, Form::kSharded);
        shard.adopt(at::full({shard.numel()}, 1.0 + groups.replicate.rank()));
        shard.all_reduce(groups.replicate).wait();
        EXPECT_TRUE(at::equal(shard.flat(), at::full({shard.numel()}, 3.0F)));
      },
      quick());
}

TEST(DBuffer, zeroes_gaps_and_what_nobody_filled_and_nothing_else) {
  for (const int world_size : kWorlds) {
    const auto plan = share(make_hand_plan(rotated(world_size)));
    for (unsigned chosen = 0; chosen < 32; ++chosen) {
      DBuffer partial(spec_of(plan, 0), Form::kPartial);
      partial.attach(slot_for(partial));
      std::vector<char> filled;
      // What should become of each image element: nobody's are zeroed, and so are those of unfilled parameters.
      std::vector<char> zeroed(static_cast<std::size_t>(plan->image_numel()), 1);
      for (int i = 0; i < 5; ++i) {
        filled.push_back((chosen >> i & 1U) != 0);
        const Interval whole = plan->image_interval(i);
        if (filled.back()) std::fill_n(zeroed.begin() + whole.begin, whole.size(), 0);
      }
      ByteCounters counters;
      partial.zero_unfilled(filled, counters);
      ByteCounters want;
      const auto* values = partial.flat().const_data_ptr<float>();
      for (Index i = 0; i < partial.numel(); ++i) {
        if (zeroed[static_cast<std::size_t>(i)]) {
          want.zeroed += 4;
          ASSERT_EQ(values[i], 0.0F) << i;
        } else {
          ASSERT_TRUE(std::isnan(values[i])) << i;
        }
      }
      EXPECT_EQ(counters, want);
      EXPECT_EQ(partial.flat()._version(), 0);
    }
  }
}

TEST(DBuffer, zeroes_only_within_its_prefix) {
  HandPlan spec = rotated(3);
  spec.frozen_ragged = true;
  const auto plan = share(make_hand_plan(spec));
  DBuffer partial(spec_of(plan, 0, at::kBFloat16, 1), Form::kPartial);
  partial.attach(slot_for(partial));
  ByteCounters counters;
  partial.zero_unfilled({1, 1, 1, 1, 1}, counters);
  // The image of one segment: "w", a gap, "b".
  Index padding = plan->image_numel(1) - plan->params[2].numel() - plan->params[3].numel();
  EXPECT_GT(padding, 0);
  EXPECT_EQ(counters.zeroed, 2 * padding);
  partial.zero_unfilled({0, 0, 0, 0, 0}, counters);
  EXPECT_EQ(counters.zeroed, 2 * padding + 2 * plan->image_numel(1));
}

TEST(DBuffer, a_prefix_holds_its_own_parameters_whatever_their_order) {
  HandPlan spec = rotated(3);
  spec.frozen_ragged = true;  // the frozen "k" and "q" come first in module order and last in the image
  const auto plan = share(make_hand_plan(spec));
  for (const Form form : {Form::kPartial, Form::kReplicated}) {
    DBuffer buffer(spec_of(plan, 1, at::kFloat, 2), form);
    EXPECT_EQ(buffer.segments().size(), 2U);
    EXPECT_EQ(buffer.ranges().size(), 2U);
    EXPECT_EQ(buffer.numel(), plan->image_numel(2));
    buffer.attach(slot_for(buffer));
    const auto* image = buffer.flat().const_data_ptr<float>();
    for (int i = 0; i < 5; ++i) {
      const at::Tensor tensor = buffer.tensor(i);
      EXPECT_EQ(tensor.defined(), i >= 2);
      if (!tensor.defined()) continue;
      EXPECT_EQ(tensor.const_data_ptr<float>(), image + plan->starts[static_cast<std::size_t>(i)]) << i;
    }
    buffer.detach();
    auto renamed = std::make_shared<BucketPlan>(*plan);
    for (std::size_t i = 0; i < 5; ++i) renamed->params[i].name = "renamed_" + std::to_string(i);
    buffer.rename("layers.9", renamed);
#if RAGGED_STORAGE_ERROR_TEXT
    if (form == Form::kReplicated) {
      EXPECT_THAT([&] { buffer.tensor(4).sum(); }, ThrowsMessage<std::exception>(HasSubstr("'renamed_4'")));
    }
#endif
  }
}

TEST(DBuffer, zero_scale_and_add_act_on_the_whole) {
  const auto plan = share(make_hand_plan(rotated(3)));
  DBuffer a(spec_of(plan, 1), Form::kSharded);
  DBuffer b(spec_of(plan, 1), Form::kSharded);
  const at::Tensor x = normal(a.numel(), 1);
  const at::Tensor y = normal(a.numel(), 2);
  a.adopt(x.clone());
  b.adopt(y.clone());
  const auto version = a.flat()._version();
  ByteCounters counters;
  a.add(b, counters);
  EXPECT_TRUE(at::equal(a.flat(), x + y));
  a.scale(1.0 / 3);
  EXPECT_TRUE(at::equal(a.flat(), (x + y) * (1.0 / 3)));
  a.zero(counters);
  EXPECT_TRUE(at::equal(a.flat(), at::zeros_like(x)));
  EXPECT_TRUE(at::equal(b.flat(), y));
  ByteCounters want;
  want.added = a.nbytes();
  want.zeroed = a.nbytes();
  EXPECT_EQ(counters, want);
  EXPECT_EQ(a.nbytes(), 4 * a.numel());
  EXPECT_EQ(a.flat()._version(), version);
}

TEST(DBuffer, names_parameter_and_unit_in_errors) {
#if !RAGGED_STORAGE_ERROR_TEXT
  GTEST_SKIP() << "this torch can't arm a storage with an error text";
#endif
  const auto plan = share(make_hand_plan(rotated(2)));
  DBuffer image(spec_of(plan, 0), Form::kReplicated);
  DBuffer partial(spec_of(plan, 0), Form::kPartial);
  const auto expect = [&](const char* param, const char* unit) {
    EXPECT_THAT(
        [&] { image.tensor(2).sum(); },
        ThrowsMessage<std::exception>(testing::AllOf(
            HasSubstr(std::string("Expected '") + param + "' to be unsharded"),
            HasSubstr(std::string("unit '") + unit + "'"), HasSubstr("call unshard() on the unit first"))));
    for (const DBuffer* buffer : {&image, &partial}) {
      EXPECT_THAT(
          [&] { buffer->flat().sum(); }, ThrowsMessage<std::exception>(HasSubstr(std::string("unit '") + unit + "'")));
    }
    EXPECT_THAT(
        [&] { partial.tensor(2).sum(); }, ThrowsMessage<std::exception>(HasSubstr(std::string("unit '") + unit + "'")));
  };
  expect("w", "layers.3");
  auto renamed = std::make_shared<BucketPlan>(*plan);
  renamed->params[2].name = "model.layers.7.wq";
  image.rename("model.layers.7", renamed);
  partial.rename("model.layers.7", renamed);
  EXPECT_EQ(image.plan().params[2].name, "model.layers.7.wq");
  expect("model.layers.7.wq", "model.layers.7");
  image.attach(slot_for(image));
  image.detach();
  partial.attach(slot_for(partial));
  partial.detach();
  expect("model.layers.7.wq", "model.layers.7");
}

TEST(DBuffer, marks_parameters_with_their_owner) {
  const auto plan = share(make_hand_plan(rotated(2)));
  int owner = 0;
  at::Tensor left;
  {
    DBuffer image(spec_of(plan, 0), Form::kReplicated);
    EXPECT_EQ(buffer::DroppableStorage::owner_of(image.tensor(0)), nullptr);
    image.set_owner(&owner);
    for (int i = 0; i < 5; ++i) EXPECT_EQ(buffer::DroppableStorage::owner_of(image.tensor(i)), &owner);
    image.attach(slot_for(image));
    EXPECT_EQ(buffer::DroppableStorage::owner_of(image.tensor(0).view({-1})), &owner);
    EXPECT_EQ(buffer::DroppableStorage::owner_of(image.flat()), nullptr);
    left = image.tensor(0);
  }
  EXPECT_EQ(buffer::DroppableStorage::owner_of(left), nullptr);
  EXPECT_TRUE(buffer::is_orphaned(left));
}

TEST(DBuffer, holds_buckets_of_no_elements) {
  HandPlan spec{.world_size = 3, .ragged = {0, 0, 0}};
  const auto plan = share(make_hand_plan(spec));
  run_ranks(
      3,
      [&](comm::World& world) {
        DBuffer masters(spec_of(plan, world.rank()), Form::kSharded);
        masters.adopt(at::empty({0}));
        DBuffer image(spec_of(plan, world.rank()), Form::kReplicated);
        image.attach(slot_for(image));
        ByteCounters counters;
        image.cast_from(masters, counters);
        image.all_gather(world.all()).wait();
        DBuffer partial(spec_of(plan, world.rank()), Form::kPartial);
        partial.attach(slot_for(partial));
        partial.zero_unfilled({0, 0, 0, 0, 0}, counters);
        EXPECT_EQ(partial.staging_numel(world.all(), masters, {}), 0);
        partial.reduce_scatter(world.all(), masters, {}, {}).wait();
        EXPECT_EQ(counters, ByteCounters{});
        EXPECT_EQ(image.tensor(0).numel(), 0);
      },
      quick());
}

}  // namespace
}  // namespace ragged::test
