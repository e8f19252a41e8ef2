// Small units that share collectives: nothing but the number of collectives changes. The twin is the same training with
// each unit by itself.
#include <gtest/gtest.h>

#include "ragged/optim/adamw.h"
#include "tests/fsdp/blocks.h"

namespace ragged::test {
namespace {

std::shared_ptr<Block> biased_block() {
  return std::make_shared<Block>(std::vector<std::vector<int64_t>>{{4, 4}, {4}}, [](Block& b, const at::Tensor& x) {
    return at::tanh(at::linear(x, b.p[0], b.p[1]));
  });
}

// One of its parameters takes part in nothing.
std::shared_ptr<Block> odd_block() {
  return std::make_shared<Block>(std::vector<std::vector<int64_t>>{{3, 5}, {4, 4}}, [](Block& b, const at::Tensor& x) {
    return at::tanh(at::linear(x, b.p[1]));
  });
}

// Larger than any limit here but the default.
std::shared_ptr<Block> wide_block() {
  return std::make_shared<Block>(
      std::vector<std::vector<int64_t>>{{300, 4}, {4, 300}},
      [](Block& b, const at::Tensor& x) { return at::linear(at::tanh(at::linear(x, b.p[0])), b.p[1]) * 0.05; });
}

constexpr std::size_t kLayers = 8;

// Small units around a large one, a frozen one among them; `again`: the seventh runs twice.
std::shared_ptr<Block> stack(bool again) {
  auto root =
      std::make_shared<Block>(std::vector<std::vector<int64_t>>{{4}, {4}}, [again](Block& b, const at::Tensor& x) {
        at::Tensor y = x * b.p[0];
        for (std::size_t i = 0; i < kLayers; ++i) y = fsdp::call(b.child(i), y);
        if (again) y = fsdp::call(b.child(6), y);
        return (y * b.p[1]).mean();
      });
  const std::vector<std::shared_ptr<Block>> layers{biased_block(), odd_block(),    linear_block(), linear_block(),
                                                   wide_block(),   biased_block(), linear_block(), odd_block()};
  for (std::size_t i = 0; i < kLayers; ++i) root->add("layer" + std::to_string(i), layers[i]);
  root->child(3).p[0].requires_grad_(false);
  return root;
}

constexpr Index kFew = 400;  // bytes: two to four of the small ones

struct Case {
  MeshShape mesh{1, 2};
  std::optional<bool> reshard{};
  bool bf16 = false;
  bool split = false;  // plans of several segments, with a ragged tail
  bool again = false;
  bool checkpoint = false;
  int micro_batches = 1;
  bool sync_each = false;
  fsdp::RuntimeOptions runtime{};
  bool check_order = false;
};

std::shared_ptr<fsdp::Unit> shard(Block& model, comm::World& world, const Case& c) {
  fsdp::FullyShardOptions options;
  options.groups = world.groups(c.mesh.mesh());
  options.reshard_after_forward = c.reshard;
  options.activation_checkpointing = c.checkpoint;
  if (c.bf16) options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  if (c.split) {
    options.planning.max_ragged_blocks = 6;
    options.planning.cost = {.uniform_segment = 0, .ragged_segment = 0, .ragged_block = 0};
    options.shard_policy = [](const fsdp::ParamInfo& p) -> std::optional<plan::Block> {
      if (p.shape.size() < 2) return std::nullopt;
      return plan::rows(std::min<Index>(3, p.shape[0]));
    };
  }
  std::vector<std::shared_ptr<fsdp::Unit>> units;
  for (std::size_t i = 0; i < kLayers; ++i) units.push_back(fsdp::fully_shard(model.child(i), options));
  options.activation_checkpointing = false;
  auto root = fsdp::fully_shard(model, options);
  root->set_runtime_options(c.runtime);
  return root;
}

void forward_backward(
    Block& model, fsdp::Unit& root, int rank, int step, const Case& c, std::vector<at::Tensor>& seen) {
  for (int micro = 0; micro < c.micro_batches; ++micro) {
    root.set_requires_gradient_sync(c.sync_each || micro + 1 == c.micro_batches);
    const at::Tensor loss = root.call(model, input_of(rank, 10 * step + micro));
    loss.backward();
    seen.push_back(loss.detach());
  }
}

// Everything that a rank sees: losses and its parts of gradients, a step after another, and of parameters at the end.
struct Seen {
  std::vector<at::Tensor> tensors;
  comm::Traffic traffic;
};

Seen train(comm::World& world, const Case& c) {
  auto model = stack(c.again);
  auto root = shard(*model, world, c);
  optim::AdamW adamw(root, {.lr = 0.05});
  Seen seen;
  for (int step = 0; step < 3; ++step) {
    forward_backward(*model, *root, world.rank(), step, c, seen.tensors);
    for (const auto& gradient : root->sharded_gradients()) seen.tensors.push_back(gradient.local.clone());
    adamw.step();
    root->zero_grad();
    EXPECT_EQ(root->stats().image_bytes_in_use, 0);
  }
  for (const auto& param : root->sharded_parameters()) seen.tensors.push_back(param.local.clone());
  seen.traffic = root->stats().traffic;
  return seen;
}

void expect_same_bits(Case c, std::optional<Index> merge_bytes) {
  comm::WorldOptions world_options = quick();
  world_options.comm.check_order = c.check_order;
  run_ranks(
      c.mesh.size(),
      [c, merge_bytes](comm::World& world) {
        Case alone = c;
        alone.runtime.merge_bytes = 0;
        Case together = c;
        together.runtime.merge_bytes = merge_bytes;
        const Seen want = train(world, alone);
        const Seen got = train(world, together);
        ASSERT_EQ(got.tensors.size(), want.tensors.size());
        for (std::size_t i = 0; i < want.tensors.size(); ++i) {
          ASSERT_TRUE(at::equal(got.tensors[i], want.tensors[i])) << i << " of " << want.tensors.size();
        }
        EXPECT_EQ(got.traffic.gathered_bytes, want.traffic.gathered_bytes);
        EXPECT_EQ(got.traffic.reduced_bytes, want.traffic.reduced_bytes);
        EXPECT_EQ(got.traffic.all_reduces, want.traffic.all_reduces);
        if (c.mesh.shard == 1) {
          EXPECT_EQ(got.traffic, want.traffic);
          return;
        }
        EXPECT_LT(got.traffic.all_gathers, want.traffic.all_gathers);
        if (c.mesh.replicate == 1) EXPECT_LT(got.traffic.reduce_scatters, want.traffic.reduce_scatters);
        if (c.mesh.replicate > 1) EXPECT_EQ(got.traffic.reduce_scatters, want.traffic.reduce_scatters);
      },
      world_options);
}

TEST(Merge, has_the_bits_of_each_unit_by_itself_on_every_world) {
  for (const MeshShape mesh : {MeshShape{1, 1}, MeshShape{1, 2}, MeshShape{1, 3}, MeshShape{1, 4}, MeshShape{1, 7}}) {
    for (const std::optional<Index> bytes : {std::optional<Index>(kFew), std::optional<Index>()}) {
      SCOPED_TRACE(fmt::format("{} ranks, {} bytes", mesh.shard, bytes.value_or(-1)));
      if (bytes) expect_same_bits({.mesh = mesh}, bytes);
      expect_same_bits({.mesh = mesh, .reshard = true, .bf16 = true, .split = true, .again = true}, bytes);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Merge, has_the_same_bits_in_every_mode) {
  using buffer::FreeSlots;
  const std::vector<Case> cases{
      {.reshard = false},
      {.again = true, .micro_batches = 3},
      {.micro_batches = 2, .sync_each = true},
      {.reshard = true, .checkpoint = true, .check_order = true},
      {.runtime = {.forward_prefetch = 1, .backward_prefetch = 2, .overlap_reductions = true}, .check_order = true},
      {.split = true, .runtime = {.forward_prefetch = 3, .backward_prefetch = 0}},
      {.runtime = {.backward_prefetch = 1, .overlap_reductions = true, .free_slots = FreeSlots::kKeep}}};
  for (std::size_t i = 0; i < cases.size(); ++i) {
    for (const MeshShape mesh : {MeshShape{1, 2}, MeshShape{1, 3}}) {
      SCOPED_TRACE(fmt::format("case {} of {} ranks", i, mesh.shard));
      Case c = cases[i];
      c.mesh = mesh;
      expect_same_bits(c, kFew);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Merge, replicas_merge_gathers_alone) {
  expect_same_bits({.mesh = {2, 2}}, kFew);
  expect_same_bits({.mesh = {2, 2}, .micro_batches = 2, .sync_each = true}, {});
}

// ---- counts ----

TEST(Merge, issues_as_many_collectives_as_the_limit_asks_for) {
  run_ranks(
      2,
      [](comm::World& world) {
        auto model = chain(6);
        auto root = shard_chain(*model, 6, {.groups = world.groups(layout::Mesh::shard(2))});
        ASSERT_EQ(root->units()[1]->plan()->image_numel() * 4, 64);
        ASSERT_EQ(root->plan()->image_numel() * 4, 32);
        root->set_runtime_options({.backward_prefetch = 0, .merge_bytes = 3 * 64});
        comm::Traffic before;
        for (int step = 0; step < 3; ++step) {
          root->call(*model, input_of(world.rank())).backward();
          const comm::Traffic after = root->stats().traffic;
          // Root and two, three, one; in the first forward one by one. Backward: twice three.
          EXPECT_EQ(after.all_gathers - before.all_gathers, (step == 0 ? 7 : 3) + 2);
          EXPECT_EQ(after.reduce_scatters - before.reduce_scatters, 2 + 1);
          EXPECT_EQ(after.gathered_bytes - before.gathered_bytes, 32 + 2 * 6 * 64);
          EXPECT_EQ(after.reduced_bytes - before.reduced_bytes, 32 + 6 * 64);
          before = after;
          root->zero_grad();
        }
      },
      quick());
}

void expect_forecast(const Case& c) {
  run_ranks(
      c.mesh.size(),
      [&](comm::World& world) {
        auto model = stack(/*again=*/false);
        auto root = shard(*model, world, c);
        const fsdp::StepForecast forecast = root->forecast(c.micro_batches, c.sync_each);
        EXPECT_GT(forecast.copied_bytes, 0);
        Index allocations = 0;
        for (int step = 0; step < 5; ++step) {
          const fsdp::RuntimeStats before = root->stats();
          root->reset_peaks();
          std::vector<at::Tensor> losses;
          forward_backward(*model, *root, world.rank(), step, c, losses);
          const fsdp::RuntimeStats after = root->stats();
          root->zero_grad();
          EXPECT_LE(after.peak_image_bytes, forecast.image_bytes_bound);
          EXPECT_EQ(after.image_bytes_in_use, 0);
          if (step == 0) continue;  // the first forward doesn't know yet what comes next
          EXPECT_EQ(after.traffic.all_gathers - before.traffic.all_gathers, forecast.gathers);
          EXPECT_EQ(after.traffic.gathered_bytes - before.traffic.gathered_bytes, forecast.gathered_bytes);
          EXPECT_EQ(after.traffic.reduce_scatters - before.traffic.reduce_scatters, forecast.reduces);
          EXPECT_EQ(after.traffic.reduced_bytes - before.traffic.reduced_bytes, forecast.reduced_bytes);
          EXPECT_EQ(after.bytes.cast_in - before.bytes.cast_in, forecast.cast_in_bytes);
          EXPECT_EQ(after.bytes.copied - before.bytes.copied, forecast.copied_bytes);
          EXPECT_EQ(after.peak_image_bytes, forecast.peak_image_bytes);
          EXPECT_EQ(after.peak_reduce_bytes, forecast.peak_reduce_bytes);
          if (step > 2 && c.runtime.free_slots == buffer::FreeSlots::kKeep)
            EXPECT_EQ(after.pool_allocations, allocations) << "the pool grew in step " << step;
          allocations = after.pool_allocations;
        }
      },
      quick());
}

TEST(Merge, counts_and_peaks_are_as_forecast) {
  constexpr auto kKeep = buffer::FreeSlots::kKeep;
  constexpr auto kReturn = buffer::FreeSlots::kReturn;
  for (const int world : {2, 3, 7}) {
    for (const std::optional<Index> bytes : {std::optional<Index>(kFew), std::optional<Index>()}) {
      SCOPED_TRACE(fmt::format("{} ranks, {} bytes", world, bytes.value_or(-1)));
      const bool odd = world % 2 == 1;
      expect_forecast(
          {.mesh = {1, world}, .bf16 = odd, .split = odd, .runtime = {.free_slots = kKeep, .merge_bytes = bytes}});
      expect_forecast(
          {.mesh = {1, world},
           .reshard = true,
           .micro_batches = 2,
           .sync_each = odd,
           .runtime = {
               .forward_prefetch = 1,
               .backward_prefetch = 2,
               .overlap_reductions = odd,
               .free_slots = odd ? kReturn : kKeep,
               .merge_bytes = bytes}});
    }
  }
}

TEST(Merge, is_off_where_collectives_are_stock) {
  comm::WorldOptions options = quick();
  options.comm.collectives = comm::Collectives::kStock;
  run_ranks(
      2,
      [](comm::World& world) {
        auto model = chain(3);
        auto root = shard_chain(*model, 3, {.groups = world.groups(layout::Mesh::shard(2))});
        root->set_runtime_options({.merge_bytes = 1 << 20});
        for (int step = 0; step < 2; ++step) root->call(*model, input_of(world.rank())).backward();
        EXPECT_EQ(root->stats().traffic.all_gathers, 2 * (1 + 3 + 3));
        EXPECT_EQ(root->stats().traffic.reduce_scatters, 2 * 4);
      },
      options);
}

// ---- failures and changes in between ----

// After `before` spoiled or changed something, a step gives what a fresh model gives.
void expect_good_step_after(
    const fsdp::RuntimeOptions& runtime, const std::function<void(Block&, fsdp::Unit&, int rank, bool& fail)>& before) {
  for (const int world_size : {2, 3}) {
    run_ranks(
        world_size,
        [&](comm::World& world) {
          std::map<std::string, at::Tensor> want;
          for (const bool spoiled : {false, true}) {
            auto model = chain(6);
            bool fail = false;
            model->child(2).function = [&fail](Block& b, const at::Tensor& x) {
              if (fail) throw std::runtime_error("boom");
              at::Tensor y = at::tanh(at::linear(x, b.p[0]));
              return y * 1.0;
            };
            auto root = shard_chain(*model, 6, {.groups = world.groups(layout::Mesh::shard(world_size))});
            root->set_runtime_options(runtime);
            for (int step = 0; step < 2; ++step) {
              root->call(*model, input_of(world.rank())).backward();
              root->zero_grad();
            }
            if (spoiled) before(*model, *root, world.rank(), fail);
            fail = false;
            for (int step = 0; step < 2; ++step) {
              root->zero_grad();
              root->call(*model, input_of(world.rank())).backward();
              EXPECT_EQ(root->stats().image_bytes_in_use, 0);
              if (!spoiled) want = whole_gradients(*root, world.all());
              const auto got = whole_gradients(*root, world.all());
              ASSERT_EQ(got.size(), 7U);
              for (const auto& [name, grad] : want) ASSERT_TRUE(at::equal(got.at(name), grad)) << name;
            }
          }
        },
        quick());
  }
}

TEST(Merge, a_forward_that_fails_leaves_a_good_next_step) {
  for (const int ahead : {0, 1, 4}) {  // with a merged gather in flight, or none
    expect_good_step_after(
        {.forward_prefetch = ahead, .merge_bytes = 3 * 64}, [](auto& model, auto& root, int rank, bool& fail) {
          fail = true;
          EXPECT_THROW(root.call(model, input_of(rank)), std::runtime_error);
        });
  }
}

TEST(Merge, a_backward_that_fails_leaves_a_good_next_step) {
  expect_good_step_after({.merge_bytes = 3 * 64}, [](auto& model, auto& root, int rank, bool&) {
    const at::Tensor x = input_of(rank).requires_grad_(true);
    auto forward = model.child(3).function;
    model.child(3).function = [&](Block& b, const at::Tensor& y) {  // reductions of what follows it are collected
      at::Tensor out = forward(b, y);
      out.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("boom"); });
      return out * 1.0;
    };
    EXPECT_THROW(root.call(model, x).backward(), std::runtime_error);
    model.child(3).function = forward;
  });
}

TEST(Merge, a_unit_that_fails_and_is_caught_leaves_a_good_next_step) {
  expect_good_step_after(
      {.forward_prefetch = 1, .merge_bytes = 3 * 64}, [](auto& model, auto& root, int rank, bool& fail) {
        auto forward = model.function;
        model.function = [](Block& b, const at::Tensor& x) {
          at::Tensor y = x * b.p[0];
          for (std::size_t i = 0; i < 6; ++i) {
            try {
              y = fsdp::call(b.child(i), y);
            } catch (const std::runtime_error&) {
              y = y * 2.0;
            }
          }
          return y.mean();
        };
        fail = true;
        root.call(model, input_of(rank)).backward();
        model.function = forward;
      });
}

TEST(Merge, a_forward_that_takes_another_way_leaves_a_good_next_step) {
  expect_good_step_after({.merge_bytes = 5 * 64}, [](auto& model, auto& root, int rank, bool&) {
    auto forward = model.function;
    model.function = [](Block& b, const at::Tensor& x) {  // gathered ahead: the ones between as well
      return fsdp::call(b.child(5), fsdp::call(b.child(0), x * b.p[0])).mean();
    };
    root.call(model, input_of(rank)).backward();
    EXPECT_EQ(root.stats().image_bytes_in_use, 0);
    model.function = forward;
  });
}

TEST(Merge, may_be_switched_between_steps) {
  expect_good_step_after({.merge_bytes = 0}, [](auto& model, auto& root, int rank, bool&) {
    for (const Index bytes : {3 * 64, 0, 1 << 20, 128}) {
      root.set_runtime_options({.merge_bytes = bytes});
      root.call(model, input_of(rank)).backward();
    }
  });
}

TEST(Merge, a_unit_kept_by_hand_is_passed_over) {
  expect_good_step_after({.merge_bytes = 1 << 20}, [](auto& model, auto& root, int rank, bool&) {
    root.units()[3]->unshard();
    root.call(model, input_of(rank)).backward();
    root.units()[3]->reshard();
  });
}

}  // namespace
}  // namespace ragged::test
