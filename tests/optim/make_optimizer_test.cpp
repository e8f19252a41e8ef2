// Several optimizers as one: what rules deal out is stepped as each kind by itself would.
#include "ragged/optim/make_optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/optim/trees.h"
#include "tests/support/expect_error.h"

namespace ragged::test {
namespace {

using optim::Optimizer;
using optim::OptimizerSpec;

const std::vector<MeshShape> kMeshes{{1, 1}, {1, 2}, {1, 3}, {1, 7}, {2, 2}};

// AdamW8bit keeps parameters as small as these in fp32, where it does what AdamW does: so two kinds can be held against
// one.
OptimizerSpec two_kinds() {
  OptimizerSpec spec;
  spec.rules = {{.match = "qkv|down|^head", .kind = "adamw8bit"}};
  return spec;
}

void train(Tree& tree, Optimizer& optimizer, int rank, int steps) {
  for (int step = 0; step < steps; ++step) {
    backward(tree, rank, step);
    make_up_gradients(*tree.root, step);
    optimizer.set_lr(0.01 / (1 + step));
    optimizer.step({.grad = 0.5});
    tree.root->zero_grad();
  }
}

std::vector<std::vector<float>> values(const std::vector<buffer::ShardedTensor>& tensors) {
  std::vector<std::vector<float>> all;
  for (const auto& tensor : tensors) all.push_back(values_of(tensor.local));
  return all;
}

std::vector<std::string> names(const std::vector<buffer::ShardedTensor>& tensors) {
  std::vector<std::string> all;
  for (const auto& tensor : tensors) all.push_back(tensor.name);
  return all;
}

TEST(MakeOptimizer, two_kinds_step_together_as_one_would) {
  for (const MeshShape& mesh : kMeshes) {
    SCOPED_TRACE(to_string(mesh));
    run_ranks(
        mesh.size(),
        [&](comm::World& world) {
          Tree one = make_tree(world, mesh);
          Tree two = make_tree(world, mesh);
          const auto plain = optim::make_optimizer(one.root, {});
          const auto composite = optim::make_optimizer(two.root, two_kinds());
          train(one, *plain, world.rank(), 3);
          train(two, *composite, world.rank(), 3);
          EXPECT_EQ(values(two.root->sharded_parameters()), values(one.root->sharded_parameters()));
          EXPECT_EQ(names(composite->states()), names(plain->states()));
          EXPECT_EQ(values(composite->states()), values(plain->states()));
          EXPECT_EQ(composite->steps(), plain->steps());
          EXPECT_EQ(composite->lr(), plain->lr());
        },
        quick());
  }
}

TEST(MakeOptimizer, table_has_every_parameter_once_in_the_order_of_the_tree) {
  run_ranks(
      2,
      [](comm::World& world) {
        Tree tree = make_tree(world, {1, 2});
        const auto rows = optim::make_optimizer(tree.root, two_kinds())->table();
        const auto parameters = tree.root->sharded_parameters();
        ASSERT_EQ(rows.size(), parameters.size());
        for (std::size_t i = 0; i < rows.size(); ++i) {
          EXPECT_EQ(rows[i].name, parameters[i].name);
          EXPECT_EQ(rows[i].shape, parameters[i].shape);
          EXPECT_EQ(rows[i].state_bytes, 8 * parameters[i].local.numel()) << rows[i].name;
          const bool eight = rows[i].name.find("qkv") != std::string::npos ||
              rows[i].name.find("down") != std::string::npos || rows[i].name == "head";
          EXPECT_EQ(rows[i].optimizer, eight ? "adamw8bit" : "adamw") << rows[i].name;
        }
      },
      quick());
}

TEST(MakeOptimizer, counts_of_steps_and_states_carry_over) {
  run_ranks(
      3,
      [](comm::World& world) {
        Tree whole = make_tree(world, {1, 3});
        const auto straight = optim::make_optimizer(whole.root, two_kinds());
        train(whole, *straight, world.rank(), 2);

        Tree tree = make_tree(world, {1, 3});
        const auto resumed = optim::make_optimizer(tree.root, two_kinds());
        resumed->set_steps(straight->steps());
        const auto from = straight->states();
        const auto to = resumed->states();
        for (std::size_t i = 0; i < to.size(); ++i) at::Tensor(to[i].local).copy_(from[i].local);
        EXPECT_EQ(resumed->steps(), straight->steps());
        EXPECT_EQ(values(to), values(from));
        EXPECT_THAT(straight->steps(), ::testing::Contains(2));
        EXPECT_INVALID(resumed->set_steps({1, 2}), "a count of steps for each");
      },
      quick());
}

TEST(MakeOptimizer, a_skipped_step_changes_nothing_in_any_part) {
  run_ranks(
      2,
      [](comm::World& world) {
        Tree tree = make_tree(world, {1, 2});
        const auto optimizer = optim::make_optimizer(tree.root, two_kinds());
        train(tree, *optimizer, world.rank(), 1);
        const auto before = values(tree.root->sharded_parameters());
        const auto states = values(optimizer->states());
        const auto steps = optimizer->steps();
        backward(tree, world.rank(), 1);
        optimizer->step({.grad = 1.0, .skip = true});
        EXPECT_EQ(values(tree.root->sharded_parameters()), before);
        EXPECT_EQ(values(optimizer->states()), states);
        EXPECT_EQ(optimizer->steps(), steps);
      },
      quick());
}

TEST(MakeOptimizer, learning_rate_scale_and_decay_of_a_rule_reach_the_parameter) {
  run_ranks(
      2,
      [](comm::World& world) {
        Tree ruled = make_tree(world, {1, 2});
        Tree halved = make_tree(world, {1, 2});
        OptimizerSpec spec;
        spec.rules = {{.match = "qkv", .lr_scale = 0.5}, {.match = "out|up", .weight_decay = 0.3}};
        const auto with_rules = optim::make_optimizer(ruled.root, spec);
        spec.rules = {};
        const auto plain = optim::make_optimizer(halved.root, spec);
        backward(ruled, world.rank());
        backward(halved, world.rank());
        make_up_gradients(*ruled.root, 0);
        make_up_gradients(*halved.root, 0);
        with_rules->set_lr(0.02);
        plain->set_lr(0.01);
        with_rules->step();
        plain->step();
        const auto a = ruled.root->sharded_parameters();
        const auto b = halved.root->sharded_parameters();
        for (std::size_t i = 0; i < a.size(); ++i) {
          if (a[i].name.find("qkv") != std::string::npos) {
            EXPECT_TRUE(at::equal(a[i].local, b[i].local)) << a[i].name;
          } else if (a[i].name.ends_with("norm") && a[i].local.numel() > 0) {
            EXPECT_FALSE(at::equal(a[i].local, b[i].local)) << a[i].name;
          }
        }
      },
      quick());
}

TEST(MakeOptimizer, refuses_rules_before_any_communication) {
  run_ranks(
      2,
      [](comm::World& world) {
        Tree tree = make_tree(world, {1, 2});
        world.all().barrier();  // a rank that leaves while the other still connects is a lost peer
        const auto traffic = tree.root->stats().traffic;
        OptimizerSpec spec;
        spec.rules = {{.match = "qvk", .kind = "adamw8bit"}};
        if (world.rank() == 0) {  // on one rank alone: it waits for nobody
          EXPECT_INVALID(optim::make_optimizer(tree.root, spec), "matches none");
          spec.rules = {{.match = "norm", .kind = "muon"}};
          EXPECT_INVALID(optim::make_optimizer(tree.root, spec), "Expected matrices for muon");
        }
        EXPECT_EQ(tree.root->stats().traffic.gathered_bytes, traffic.gathered_bytes);
      },
      quick());
}

}  // namespace
}  // namespace ragged::test
