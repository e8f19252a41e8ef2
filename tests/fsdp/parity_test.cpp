// Sharded training equals unsharded training, bit for bit on the all-to-all route: loss, gradients, gradient norm and
// parameters at each of ten steps. See design in docs/architecture.md, "Parity".
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ragged/optim/adamw.h"
#include "ragged/optim/clip_grad.h"
#include "tests/support/reference.h"

namespace ragged::test {
namespace {

using fsdp::fully_shard;

constexpr int kSteps = 10;
constexpr double kMaxNorm = 0.5;

struct Case {
  MeshShape mesh;
  std::optional<bool> reshard{};
  at::ScalarType param_dtype = at::kFloat;
  at::ScalarType reduce_dtype = at::kFloat;
  int micro_batches = 1;
  bool sync_each_micro_batch = false;
  bool postpone_all_reduce = false;
  bool checkpoint = false;
  Index rows = 0;
  bool split = false;  // segments cost nothing: buckets fall apart into uniform ones and a ragged tail
  Index ragged_blocks = 0;
  int forward_prefetch = 0;
  int backward_prefetch = 1;
  Index merge_bytes = 0;
  fsdp::GradientsInPlace in_place = fsdp::GradientsInPlace::kSameBits;  // weights of the model, where that can be

  // Three and more replicas are summed in Gloo's own order, and postponing the all-reduce sums shards over
  // micro-batches first. AdamW makes much of such last bits, so it learns more slowly there.
  bool exact() const { return mesh.replicate <= 2 && !postpone_all_reduce; }
  double lr() const { return exact() ? 1e-2 : 1e-3; }
};

std::string to_string(const Case& c) {
  return fmt::format(
      "mesh {} reshard {} {}/{} micro {} sync {} postpone {} checkpoint {} rows {} split {} prefetch {}/{} merge {} in "
      "place {}",
      to_string(c.mesh), c.reshard ? (*c.reshard ? "true" : "false") : "auto", c10::toString(c.param_dtype),
      c10::toString(c.reduce_dtype), c.micro_batches, c.sync_each_micro_batch, c.postpone_all_reduce, c.checkpoint,
      c.rows, c.split, c.forward_prefetch, c.backward_prefetch, c.merge_bytes, static_cast<int>(c.in_place));
}

// What each step of the reference gave, computed once and read by all ranks.
struct Expected {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> gradients, parameters;
  double norm = 0.0;
};

std::vector<Expected> expect(const Case& c) {
  ReferenceOptions options;
  options.mesh = c.mesh;
  options.param_dtype = c.param_dtype;
  options.reduce_dtype = c.reduce_dtype;
  options.micro_batches = c.micro_batches;
  options.sync_each_micro_batch = c.sync_each_micro_batch;
  options.lr = c.lr();
  Reference reference(options);
  std::vector<Expected> steps;
  for (int step = 0; step < kSteps; ++step) {
    Expected e;
    e.losses = reference.forward_backward(step);
    e.norm = reference.grad_norm();
    for (const auto& [name, grad] : reference.gradients()) e.gradients[name] = grad.clone();
    if (e.norm > kMaxNorm) reference.scale_gradients(kMaxNorm / e.norm);
    reference.adamw_step();
    for (const auto& [name, param] : reference.parameters()) e.parameters[name] = param.clone();
    steps.push_back(std::move(e));
  }
  return steps;
}

std::shared_ptr<fsdp::Unit> shard(TinyModel& model, comm::World& world, const Case& c) {
  fsdp::FullyShardOptions options;
  options.groups = world.groups(c.mesh.mesh());
  options.mixed_precision = {.param_dtype = c.param_dtype, .reduce_dtype = c.reduce_dtype};
  options.reshard_after_forward = c.reshard;
  options.gradients_in_place = c.in_place;
  const bool over = c.mesh.size() % 2 == 0;
  options.gradient_memory = over ? fsdp::GradientMemory::kOverWeights : fsdp::GradientMemory::kOwn;
  if (c.rows > 0) {
    options.shard_policy = [rows = c.rows](const fsdp::ParamInfo& p) -> std::optional<plan::Block> {
      if (p.shape.size() < 2) return std::nullopt;
      return plan::rows(std::min<Index>(rows, p.shape[0]));
    };
  }
  if (c.split) {
    options.planning.max_ragged_blocks = c.ragged_blocks;
    options.planning.cost = {.uniform_segment = 0, .ragged_segment = 0, .ragged_block = 0};
  }
  std::vector<std::shared_ptr<fsdp::Unit>> units;
  fsdp::FullyShardOptions block_options = options;
  block_options.activation_checkpointing = c.checkpoint;
  for (const auto& layer : model.layers) units.push_back(fully_shard(*layer, block_options));
  auto root = fully_shard(model, options);
  // As on a CPU and as on other devices, in turns.
  root->set_runtime_options(
      {.forward_prefetch = c.forward_prefetch,
       .backward_prefetch = c.backward_prefetch,
       .overlap_reductions = c.backward_prefetch > 0,
       .free_slots = c.mesh.size() % 2 == 1 ? buffer::FreeSlots::kReturn : buffer::FreeSlots::kKeep,
       .merge_bytes = c.merge_bytes});
  return root;
}

void expect_equal_pieces(
    const std::vector<buffer::ShardedTensor>& pieces, const std::map<std::string, at::Tensor>& whole, bool exact,
    const std::string& what) {
  std::size_t found = 0;
  for (const buffer::ShardedTensor& piece : pieces) {
    ASSERT_TRUE(whole.count(piece.name)) << what << " " << piece.name << " exists only in the sharded run";
    ++found;
    const at::Tensor want = whole.at(piece.name)
                                .reshape({-1})
                                .narrow(0, piece.owned.begin, piece.owned.size())
                                .to(piece.local.scalar_type());
    if (exact) {
      ASSERT_TRUE(at::equal(piece.local, want))
          << what << " " << piece.name << " differs by " << (piece.local - want).abs().max().item<double>();
    } else if (want.numel() > 0) {
      const double scale = whole.at(piece.name).norm().item<double>();
      ASSERT_LE((piece.local - want).norm().item<double>(), 2e-6 * scale + 1e-12) << what << " " << piece.name;
    }
  }
  ASSERT_EQ(found, whole.size()) << what;
}

// How many buckets have several uniform segments, and how many a ragged tail.
struct Splits {
  int uniform = 0;
  int ragged = 0;
};

Splits splits_of(const fsdp::Unit& root) {
  Splits splits;
  for (const auto& unit : root.units()) {
    const auto of = [&](plan::SegmentKind kind) {
      const auto& segments = unit->plan()->segments;
      return std::count_if(segments.begin(), segments.end(), [kind](const plan::Segment& segment) {
        return segment.kind == kind && segment.numel > 0;
      });
    };
    splits.uniform += of(plan::SegmentKind::kUniform) > 1;
    splits.ragged += of(plan::SegmentKind::kRagged) > 0;
  }
  return splits;
}

Splits run(const Case& c) {
  Splits splits;
  SCOPED_TRACE(to_string(c));
  const std::vector<Expected> expected = expect(c);
  const bool exact = c.exact();
  run_ranks(
      c.mesh.size(),
      [&](comm::World& world) {
        auto model = make_tiny_model();
        auto root = shard(*model, world, c);
        if (world.rank() == 0) splits = splits_of(*root);
        optim::AdamW adamw(root, {.lr = c.lr(), .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1});
        for (int step = 0; step < kSteps; ++step) {
          const Expected& e = expected[static_cast<std::size_t>(step)];
          double loss_value = 0.0;
          for (int micro = 0; micro < c.micro_batches; ++micro) {
            const bool last = micro + 1 == c.micro_batches;
            root->set_requires_gradient_sync(last || c.sync_each_micro_batch || c.postpone_all_reduce);
            root->set_requires_all_reduce(last || !c.postpone_all_reduce);
            const Batch batch = make_batch({}, step, world.rank(), micro);
            const at::Tensor loss = root->call(*model, batch.tokens, batch.targets);
            loss.backward();
            loss_value = loss.item<double>();
          }
          if (exact) {
            ASSERT_EQ(loss_value, e.losses[static_cast<std::size_t>(world.rank())]) << "loss at step " << step;
          } else {
            ASSERT_NEAR(loss_value, e.losses[static_cast<std::size_t>(world.rank())], 1e-5);
          }
          const std::string at_step = fmt::format("step {} rank {}: ", step, world.rank());
          expect_equal_pieces(root->sharded_gradients(), e.gradients, exact, at_step + "gradient");
          if (testing::Test::HasFatalFailure()) return;
          const double norm = optim::grad_norm(*root);
          ASSERT_NEAR(norm, e.norm, 1e-12 * e.norm + (exact ? 0.0 : 1e-6));
          // Both sides get the same clip factor.
          if (e.norm > kMaxNorm) {
            for (const auto& shard : root->flat_shards()) {
              if (shard.grads.defined()) shard.grads.mul_(kMaxNorm / e.norm);
            }
          }
          adamw.step();
          root->zero_grad();
          expect_equal_pieces(root->sharded_parameters(), e.parameters, exact, at_step + "parameter");
          if (testing::Test::HasFatalFailure()) return;
        }
      },
      quick());
  return splits;
}

const std::vector<MeshShape> kMeshes{{1, 1}, {1, 2}, {1, 3}, {1, 4}, {2, 1}, {3, 1}, {2, 2}};

TEST(Parity, holds_on_every_mesh_with_and_without_resharding) {
  for (const MeshShape& mesh : kMeshes) {
    for (const std::optional<bool> reshard :
         {std::optional<bool>(), std::optional<bool>(true), std::optional<bool>(false)}) {
      run({.mesh = mesh, .reshard = reshard});
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Parity, holds_at_a_prime_world) {
  run({.mesh = {1, 7}});
}

TEST(Parity, holds_with_gradients_that_are_copied) {
  for (const MeshShape& mesh : {MeshShape{1, 1}, MeshShape{1, 3}, MeshShape{2, 2}}) {
    run({.mesh = mesh, .in_place = fsdp::GradientsInPlace::kNo});
    if (HasFatalFailure()) return;
    run({.mesh = mesh, .micro_batches = 3, .checkpoint = true, .in_place = fsdp::GradientsInPlace::kNo});
    if (HasFatalFailure()) return;
  }
}

TEST(Parity, holds_in_mixed_precision) {
  for (const MeshShape& mesh : kMeshes) {
    run({.mesh = mesh, .param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
    if (HasFatalFailure()) return;
    run({.mesh = mesh, .param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16});
    if (HasFatalFailure()) return;
  }
}

TEST(Parity, holds_in_each_accumulation_mode) {
  for (const MeshShape& mesh : kMeshes) {
    for (const bool sync : {false, true}) {
      run({.mesh = mesh, .micro_batches = 3, .sync_each_micro_batch = sync});
      if (HasFatalFailure()) return;
    }
    run({.mesh = mesh, .param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .micro_batches = 2});
    if (HasFatalFailure()) return;
  }
}

TEST(Parity, holds_when_the_all_reduce_is_postponed) {
  for (const MeshShape& mesh : {MeshShape{2, 1}, MeshShape{2, 2}, MeshShape{3, 1}}) {
    run({.mesh = mesh, .micro_batches = 3, .postpone_all_reduce = true});
    if (HasFatalFailure()) return;
  }
}

TEST(Parity, holds_with_activation_checkpointing) {
  for (const MeshShape& mesh : kMeshes) {
    run({.mesh = mesh, .checkpoint = true});
    if (HasFatalFailure()) return;
    run(
        {.mesh = mesh,
         .param_dtype = at::kBFloat16,
         .reduce_dtype = at::kFloat,
         .micro_batches = 2,
         .checkpoint = true});
    if (HasFatalFailure()) return;
  }
}

TEST(Parity, holds_over_several_uniform_segments_and_ragged_tails) {
  Splits seen;
  for (const MeshShape& mesh : {MeshShape{1, 2}, MeshShape{1, 3}, MeshShape{1, 4}, MeshShape{1, 7}, MeshShape{2, 2}}) {
    for (const Index ragged_blocks : {0, 5}) {
      const bool bf16 = ragged_blocks > 0 || mesh.shard == 4;
      const Splits splits = run(
          {.mesh = mesh,
           .reshard = bf16 ? std::optional<bool>() : std::optional<bool>(true),
           .param_dtype = bf16 ? at::kBFloat16 : at::kFloat,
           .micro_batches = bf16 ? 2 : 1,
           .checkpoint = bf16,
           .rows = 5,
           .split = true,
           .ragged_blocks = ragged_blocks});
      if (HasFatalFailure()) return;
      seen.uniform += splits.uniform;
      seen.ragged += splits.ragged;
    }
  }
  EXPECT_GE(seen.uniform, 3) << "plans with several uniform segments";
  EXPECT_GE(seen.ragged, 3) << "plans with a ragged tail";
}

// Two blocks in a collective, and all of the model.
TEST(Parity, holds_with_units_that_merge) {
  for (const MeshShape& mesh : {MeshShape{1, 2}, MeshShape{1, 3}, MeshShape{1, 7}, MeshShape{2, 2}}) {
    const Index block_bytes = 6800;
    run({.mesh = mesh, .reshard = true, .merge_bytes = 2 * block_bytes});
    if (HasFatalFailure()) return;
    run(
        {.mesh = mesh,
         .param_dtype = at::kBFloat16,
         .reduce_dtype = at::kFloat,
         .micro_batches = 2,
         .sync_each_micro_batch = true,
         .checkpoint = true,
         .rows = 5,
         .split = true,
         .ragged_blocks = 5,
         .merge_bytes = 1 << 20});
    if (HasFatalFailure()) return;
  }
}

TEST(Parity, holds_with_row_blocks_and_deeper_prefetch) {
  for (const MeshShape& mesh : {MeshShape{1, 2}, MeshShape{1, 3}, MeshShape{2, 2}}) {
    run({.mesh = mesh, .reshard = true, .rows = 5, .forward_prefetch = 1, .backward_prefetch = 2});
    if (HasFatalFailure()) return;
    run({.mesh = mesh, .rows = 4, .forward_prefetch = 2, .backward_prefetch = 0});
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace ragged::test
