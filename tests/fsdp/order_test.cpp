// Ranks that use different parameters of a unit in a step: they neither hang nor disagree, and gradients are means
// over ranks with missing ones as zero.
#include <gtest/gtest.h>

#include "ragged/optim/adamw.h"
#include "tests/fsdp/blocks.h"

namespace ragged::test {
namespace {

using fsdp::fully_shard;

fsdp::FullyShardOptions plain(comm::World& world, int size) {
  fsdp::FullyShardOptions options;
  options.groups = world.groups(layout::Mesh::shard(size));
  return options;
}

// Two blocks; in each, what is used depends on the rank that runs it.
using Choose = std::function<at::Tensor(Block&, const at::Tensor&, int rank, int layer)>;

std::shared_ptr<Block> model_of(const Choose& choose, int rank, int blocks = 3) {
  auto root = std::make_shared<Block>(std::vector<std::vector<int64_t>>{{4}}, [blocks](Block& b, const at::Tensor& x) {
    at::Tensor y = x * b.p[0];
    for (int i = 0; i < blocks; ++i) y = fsdp::call(b.child(static_cast<std::size_t>(i)), y);
    return y.mean();
  });
  for (int i = 0; i < blocks; ++i) {
    root->add(
        "layer" + std::to_string(i),
        std::make_shared<Block>(
            std::vector<std::vector<int64_t>>{{4, 4}, {4, 4}, {3, 5}},
            [choose, rank, i](Block& b, const at::Tensor& x) { return choose(b, x, rank, i); }));
  }
  return root;
}

// Gradients of the mean over ranks, computed by one process.
std::map<std::string, at::Tensor> expected(const Choose& choose, int world_size) {
  std::map<std::string, at::Tensor> sums;
  for (int rank = 0; rank < world_size; ++rank) {
    auto model = model_of(choose, rank);
    model->forward(input_of(rank)).backward();
    for (const auto& item : model->named_parameters()) {
      if (!item.value().grad().defined()) continue;
      auto& sum = sums[item.key()];
      sum = sum.defined() ? sum + item.value().grad() : item.value().grad().clone();
    }
  }
  for (auto& [name, sum] : sums) sum = sum * (1.0 / world_size);
  return sums;
}

void check(const Choose& choose, bool check_order = false) {
  for (const int world_size : {2, 3, 4}) {
    SCOPED_TRACE(world_size);
    const auto want = expected(choose, world_size);
    comm::WorldOptions world_options = quick();
    world_options.comm.check_order = check_order;
    run_ranks(
        world_size,
        [&](comm::World& world) {
          auto model = model_of(choose, world.rank());
          auto root = shard_chain(*model, 3, plain(world, world_size));
          for (int step = 0; step < 3; ++step) {
            root->call(*model, input_of(world.rank())).backward();
            const auto got = whole_gradients(*root, world.all());
            ASSERT_EQ(got.size(), want.size());
            for (const auto& [name, grad] : want) {
              ASSERT_TRUE(got.count(name)) << name;
              ASSERT_TRUE(at::equal(got.at(name), grad)) << name << " rank " << world.rank() << " step " << step;
            }
            root->zero_grad();
          }
        },
        world_options);
  }
}

TEST(Order, holds_when_ranks_take_different_branches_inside_a_unit) {
  check([](Block& b, const at::Tensor& x, int rank, int) { return at::tanh(at::linear(x, b.p[rank % 2 ? 1 : 0])); });
}

TEST(Order, holds_when_one_rank_ignores_the_units_input) {
  check([](Block& b, const at::Tensor& x, int rank, int) {
    if (rank == 1) return at::tanh(at::linear(at::ones_like(x), b.p[0]));
    return at::tanh(at::linear(x, b.p[0]));
  });
}

TEST(Order, holds_when_one_rank_uses_no_parameter_at_all) {
  check([](Block& b, const at::Tensor& x, int rank, int) {
    return rank == 0 ? x * 2.0 : at::tanh(at::linear(x, b.p[1]));
  });
}

TEST(Order, holds_when_one_rank_detaches_its_output) {
  check([](Block& b, const at::Tensor& x, int rank, int layer) {
    const at::Tensor y = at::tanh(at::linear(x, b.p[0]));
    return rank == 1 && layer == 1 ? y.detach() : y;
  });
}

TEST(Order, ranks_issue_the_same_sequence_under_the_order_check) {
  check(
      [](Block& b, const at::Tensor& x, int rank, int) {
        if (rank == 0) return at::linear(at::ones_like(x), b.p[0]);
        return rank == 1 ? x * 1.5 : at::linear(x, b.p[1]);
      },
      /*check_order=*/true);
}

TEST(Order, parameter_that_no_rank_used_keeps_no_gradient_and_isnt_decayed) {
  run_ranks(
      3,
      [](comm::World& world) {
        auto model =
            model_of([](Block& b, const at::Tensor& x, int, int) { return at::linear(x, b.p[0]); }, world.rank());
        auto root = shard_chain(*model, 3, plain(world, 3));
        optim::AdamW adamw(root, {.lr = 0.1, .weight_decay = 0.5});
        const at::Tensor unused = root->full_parameter("layer1.p2");
        const at::Tensor used = root->full_parameter("layer1.p0");
        for (int step = 0; step < 2; ++step) {
          root->call(*model, input_of(world.rank())).backward();
          for (const auto& gradient : root->sharded_gradients()) EXPECT_EQ(gradient.name.find("p2"), std::string::npos);
          adamw.step();
          root->zero_grad();
        }
        EXPECT_TRUE(at::equal(root->full_parameter("layer1.p2"), unused));
        EXPECT_FALSE(at::equal(root->full_parameter("layer1.p0"), used));
      },
      quick());
}

TEST(Order, static_use_skips_the_flags) {
  run_ranks(
      2,
      [](comm::World& world) {
        auto model = chain(2);
        auto root = shard_chain(*model, 2, plain(world, 2));
        root->set_runtime_options({.static_use = true});
        root->call(*model, input_of(world.rank())).backward();
        EXPECT_EQ(root->stats().traffic.all_reduces, 1);  // the plans
        EXPECT_EQ(root->sharded_gradients().size(), 3U);
      },
      quick());
}

TEST(Order, parameter_used_in_one_micro_batch_only) {
  // The second micro-batch brings a parameter that the first didn't use, on one rank.
  run_ranks(
      2,
      [](comm::World& world) {
        int micro = 0;
        auto choose = [&micro](Block& b, const at::Tensor& x, int rank, int) {
          return micro == 1 && rank == 1 ? at::linear(x, b.p[1]) : at::linear(x, b.p[0]);
        };
        for (const bool sync_each : {false, true}) {
          std::map<std::string, at::Tensor> want;
          for (int m = 0; m < 2; ++m) {
            std::map<std::string, at::Tensor> sum;
            for (int rank = 0; rank < 2; ++rank) {
              micro = m;
              auto model = model_of(choose, rank);
              model->forward(input_of(rank, m)).backward();
              for (const auto& item : model->named_parameters()) {
                if (item.value().grad().defined()) {
                  auto& s = sum[item.key()];
                  s = s.defined() ? s + item.value().grad() : item.value().grad().clone();
                }
              }
            }
            for (auto& [name, s] : sum) want[name] = want.count(name) ? want[name] + s * 0.5 : s * 0.5;
          }
          auto model = model_of(choose, world.rank());
          auto root = shard_chain(*model, 3, plain(world, 2));
          for (micro = 0; micro < 2; ++micro) {
            root->set_requires_gradient_sync(sync_each || micro == 1);
            root->call(*model, input_of(world.rank(), micro)).backward();
          }
          const auto got = whole_gradients(*root, world.all());
          ASSERT_EQ(got.size(), want.size());
          for (const auto& [name, grad] : want) {
            ASSERT_LE((got.at(name) - grad).norm().item<double>(), 2e-6 * grad.norm().item<double>()) << name;
          }
        }
      },
      quick());
}

}  // namespace
}  // namespace ragged::test
