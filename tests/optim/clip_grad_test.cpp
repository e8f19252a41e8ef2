// One norm over all shards, the same on every rank, and clipping by it.
#include "ragged/optim/clip_grad.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/optim/trees.h"
#include "tests/support/expect_error.h"

namespace ragged::test {
namespace {

// Of the made-up gradients of one step, whole.
double full_norm(const std::vector<buffer::ShardedTensor>& gradients, int step) {
  double sum = 0.0;
  for (const buffer::ShardedTensor& grad : gradients) {
    for (const float value : made_up_gradient(grad.name, numel_of(grad), step)) {
      sum += static_cast<double>(value) * static_cast<double>(value);
    }
  }
  return std::sqrt(sum);
}

std::vector<std::vector<float>> gradients_of(fsdp::Unit& root) {
  std::vector<std::vector<float>> values;
  for (const auto& grad : root.sharded_gradients()) values.push_back(values_of(grad.local));
  return values;
}

const std::vector<MeshShape> kMeshes{{1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 7}, {2, 2}, {2, 1}};

TEST(GradNorm, is_the_full_norm_and_the_same_number_on_all_ranks) {
  for (const MeshShape& mesh : kMeshes) {
    for (const bool whole_tensors : {false, true}) {
      SCOPED_TRACE(to_string(mesh));
      std::vector<double> norms(static_cast<std::size_t>(mesh.size()));
      std::vector<char> owns_nothing(norms.size(), 0);
      run_ranks(
          mesh.size(),
          [&](comm::World& world) {
            Tree tree = make_tree(world, mesh, whole_tensors);
            EXPECT_EQ(optim::grad_norm(*tree.root), 0.0);  // nobody has a gradient yet
            backward(tree, world.rank());
            make_up_gradients(*tree.root, 3);
            const auto rank = static_cast<std::size_t>(world.rank());
            norms[rank] = optim::grad_norm(*tree.root);
            EXPECT_NEAR(norms[rank], full_norm(tree.root->sharded_gradients(), 3), 1e-12 * norms[rank]);
            for (const auto& shard : tree.root->flat_shards()) owns_nothing[rank] |= shard.params.numel() == 0;
          },
          quick());
      EXPECT_EQ(norms, std::vector<double>(norms.size(), norms[0]));
    }
  }
}

// One parameter in one block: a single rank owns it, the others own nothing at all.
struct Single : torch::nn::Module, fsdp::Shardable {
  Single() { weight = register_parameter("weight", at::ones({3, 2}).requires_grad_(true)); }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight).sum(); }
  at::Tensor weight;
};

TEST(GradNorm, takes_ranks_along_that_own_nothing) {
  for (const int world_size : {2, 3, 7}) {
    std::vector<double> norms(static_cast<std::size_t>(world_size));
    std::atomic<int> empty = 0;
    run_ranks(
        world_size,
        [&](comm::World& world) {
          Single model;
          fsdp::FullyShardOptions options;
          options.groups = world.groups(layout::Mesh::shard(world_size));
          options.shard_policy = [](const fsdp::ParamInfo&) { return plan::rows(3); };
          const auto root = fsdp::fully_shard(model, options);
          root->call(model, at::ones({1, 2})).backward();
          if (root->sharded_parameters()[0].local.numel() == 0) ++empty;
          norms[static_cast<std::size_t>(world.rank())] = optim::clip_grad_norm(*root, 1.0);
          const at::Tensor local = root->sharded_gradients()[0].local;
          EXPECT_NEAR(local.norm().item<double>(), local.numel() > 0 ? 1.0 : 0.0, 1e-6);
        },
        quick());
    EXPECT_EQ(empty, world_size - 1);
    for (const double norm : norms) EXPECT_NEAR(norm, std::sqrt(6.0), 1e-12);
  }
}

TEST(ClipGradNorm, scales_by_one_factor_where_the_norm_is_too_large) {
  for (const MeshShape& mesh : kMeshes) {
    SCOPED_TRACE(to_string(mesh));
    run_ranks(
        mesh.size(),
        [&](comm::World& world) {
          Tree tree = make_tree(world, mesh);
          backward(tree, world.rank());
          make_up_gradients(*tree.root, 1);
          const auto before = gradients_of(*tree.root);
          const double norm = optim::grad_norm(*tree.root);
          EXPECT_EQ(optim::clip_grad_norm(*tree.root, 2 * norm), norm);
          EXPECT_EQ(gradients_of(*tree.root), before);
          EXPECT_EQ(optim::clip_grad_norm(*tree.root, norm), norm);
          EXPECT_EQ(gradients_of(*tree.root), before);

          EXPECT_EQ(optim::clip_grad_norm(*tree.root, 0.25 * norm), norm);
          const auto after = gradients_of(*tree.root);
          const auto factor = static_cast<float>(0.25 * norm / norm);
          for (std::size_t i = 0; i < before.size(); ++i) {
            for (std::size_t e = 0; e < before[i].size(); ++e) EXPECT_EQ(after[i][e], before[i][e] * factor);
          }
          EXPECT_NEAR(optim::grad_norm(*tree.root), 0.25 * norm, 1e-6 * norm);
        },
        quick());
  }
}

TEST(GradClip, says_what_clipping_would_do_and_touches_nothing) {
  run_ranks(
      3,
      [&](comm::World& world) {
        Tree tree = make_tree(world, {1, 3});
        backward(tree, world.rank());
        make_up_gradients(*tree.root, 1);
        const auto before = gradients_of(*tree.root);
        const double norm = optim::grad_norm(*tree.root);
        for (const double max_norm : {0.25 * norm, norm, 2 * norm}) {
          const optim::GradClip clip = optim::grad_clip(*tree.root, max_norm);
          EXPECT_EQ(clip.norm, norm);
          EXPECT_EQ(clip.factor, max_norm < norm ? max_norm / norm : 1.0);
        }
        EXPECT_EQ(gradients_of(*tree.root), before);
        if (world.rank() == 1) tree.root->flat_shards()[0].grads.mutable_data_ptr<float>()[0] = std::nanf("");
        const optim::GradClip clip = optim::grad_clip(*tree.root, 1e-3);
        EXPECT_TRUE(std::isnan(clip.norm));
        EXPECT_EQ(clip.factor, 1.0);
      },
      quick());
}

TEST(ClipGradNorm, refuses_a_largest_norm_that_is_not_positive) {
  run_ranks(
      2,
      [&](comm::World& world) {
        Tree tree = make_tree(world, {1, 2});
        for (const double nonsense : {0.0, -1.0, std::nan("")}) {
          EXPECT_INVALID(
              optim::clip_grad_norm(*tree.root, nonsense), "[clip_grad_norm] Expected max_norm > 0, but got");
        }
      },
      quick());
}

TEST(ClipGradNorm, returns_a_norm_that_is_not_finite_and_scales_nothing) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    for (const MeshShape& mesh : {MeshShape{1, 1}, MeshShape{1, 3}}) {
      run_ranks(
          mesh.size(),
          [&](comm::World& world) {
            Tree tree = make_tree(world, mesh);
            backward(tree, world.rank());
            make_up_gradients(*tree.root, 1);
            // On one rank only: all learn of it.
            const auto grads = tree.root->flat_shards()[0].grads;
            ASSERT_GT(grads.numel(), 0);
            if (world.rank() == 0) grads.mutable_data_ptr<float>()[0] = bad;
            const at::Tensor before = grads.clone();
            const double norm = optim::clip_grad_norm(*tree.root, 1e-3);
            EXPECT_EQ(std::isnan(norm), std::isnan(bad));
            EXPECT_FALSE(std::isfinite(norm));
            EXPECT_TRUE(at::equal(grads.view(at::kInt), before.view(at::kInt)));
          },
          quick());
    }
  }
}

// fp64 from the first addition on: fp32 would overflow, or lose the small ones.
TEST(GradNorm, neither_overflows_nor_loses_small_values) {
  run_ranks(
      2,
      [&](comm::World& world) {
        Tree tree = make_tree(world, {1, 2});
        backward(tree, world.rank());
        for (const auto& shard : tree.root->flat_shards()) shard.grads.zero_();
        at::Tensor grads = tree.root->flat_shards()[0].grads;
        grads.mutable_data_ptr<float>()[0] = 3e30F;
        grads.mutable_data_ptr<float>()[1] = 4e30F;
        EXPECT_NEAR(optim::grad_norm(*tree.root) / (5e30 * std::sqrt(2.0)), 1.0, 1e-7);
        grads.fill_(1.0);
        grads.mutable_data_ptr<float>()[0] = 1e4F;
        const auto total = static_cast<double>(tree.root->sharded_parameters().empty() ? 0 : grads.numel() - 1);
        const double mine = 1e8 + total;
        // Both ranks' shards are equally long in a uniform segment.
        EXPECT_NEAR(optim::grad_norm(*tree.root), std::sqrt(2 * mine), 1e-9 * mine);
      },
      quick());
}

}  // namespace
}  // namespace ragged::test
