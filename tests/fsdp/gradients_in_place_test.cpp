// Gradients computed in their slots: the bits, counters and flags are those of gradients that are copied there.
#include "ragged/fsdp/gradients_in_place.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "ragged/base/error.h"
#include "ragged/fsdp/mixed_gemm.h"
#include "tests/fsdp/blocks.h"

namespace ragged::test {
namespace {

using fsdp::GradientsInPlace;

struct Setting {
  GradientsInPlace in_place = GradientsInPlace::kNo;
  at::ScalarType param_dtype = at::kFloat;
  bool checkpoint = false;
};

// What backwards of one block left: gradients by name, whole, and what moved.
struct Outcome {
  std::map<std::string, at::Tensor> gradients;
  buffer::ByteCounters bytes;
};

using MakeBlock = std::function<std::shared_ptr<Block>()>;
using Body = std::function<void(fsdp::Unit& root, Block& block, int rank)>;

Outcome outcome(int world_size, const Setting& setting, const MakeBlock& make, const Body& body) {
  Outcome found;
  run_ranks(
      world_size,
      [&](comm::World& world) {
        auto block = make();
        fsdp::FullyShardOptions options;
        options.groups = world.groups(layout::Mesh::shard(world_size));
        options.gradients_in_place = setting.in_place;
        options.mixed_precision = {.param_dtype = setting.param_dtype, .reduce_dtype = at::kFloat};
        options.activation_checkpointing = setting.checkpoint;
        auto root = fsdp::fully_shard(*block, options);
        body(*root, *block, world.rank());
        auto gradients = whole_gradients(*root, world.all());
        if (world.rank() != 0) return;
        found = {.gradients = std::move(gradients), .bytes = root->stats().bytes};
      },
      quick());
  return found;
}

void expect_same_bits(const Outcome& got, const Outcome& want) {
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (const auto& [name, gradient] : want.gradients) {
    ASSERT_TRUE(got.gradients.count(name)) << name;
    EXPECT_TRUE(at::equal(got.gradients.at(name), gradient)) << name;
  }
}

at::Tensor data(at::IntArrayRef sizes, int seed) {
  at::Tensor values = at::zeros(sizes);
  fsdp::fill_initial_values(
      fsdp::normal(0.0, 1.0), static_cast<std::uint64_t>(seed), "x", {0, values.numel()},
      values.mutable_data_ptr<float>());
  return values;
}

// Two linears with and without bias, one of them used twice, an embedding with repeated indices, and a parameter that
// nothing uses.
std::shared_ptr<Block> mixed_block() {
  return std::make_shared<Block>(
      std::vector<std::vector<int64_t>>{{13, 7}, {13}, {7, 13}, {5, 7}, {3, 3}}, [](Block& b, const at::Tensor& x) {
        const at::Tensor rows = fsdp::embedding(b.p[3], at::tensor({4, 1, 1, 0, 4, 4}, at::kLong)).view({2, 3, 7});
        at::Tensor y = (x + rows).contiguous();
        for (int use = 0; use < 2; ++use) {
          y = at::tanh(fsdp::linear(at::tanh(fsdp::linear(y, b.p[0], b.p[1])), b.p[2]));
        }
        return y.mean();
      });
}

constexpr Index kMatrices = (13 * 7 + 7 * 13 + 5 * 7) * 4;
constexpr Index kUsed = kMatrices + 13 * 4;

TEST(GradientsInPlace, have_the_bits_of_copies) {
  for (const int world_size : {1, 2, 3, 7}) {
    for (const bool checkpoint : {false, true}) {
      SCOPED_TRACE(fmt::format("world {} checkpoint {}", world_size, checkpoint));
      const Body body = [](fsdp::Unit& root, Block& block, int rank) {
        for (int step = 0; step < 2; ++step) {
          root.zero_grad();
          root.call(block, data({2, 3, 7}, 10 * rank + step)).backward();
        }
      };
      const Outcome copied = outcome(world_size, {.checkpoint = checkpoint}, mixed_block, body);
      const Outcome in_place =
          outcome(world_size, {.in_place = GradientsInPlace::kSameBits, .checkpoint = checkpoint}, mixed_block, body);
      EXPECT_EQ(copied.bytes.cast_grad, 2 * kUsed);
      EXPECT_EQ(copied.bytes.in_place, 0);
      EXPECT_EQ(in_place.bytes.cast_grad, 2 * 13 * 4) << "the bias is all that is copied";
      EXPECT_EQ(in_place.bytes.in_place, 2 * kMatrices);
      EXPECT_EQ(in_place.bytes.added, 2 * 2 * 13 * 7 * 4) << "second uses are added";
      EXPECT_EQ(in_place.bytes.copied, 0);
      EXPECT_EQ(in_place.gradients.count("p4"), 0U) << "nobody used it";
      expect_same_bits(in_place, copied);
    }
  }
}

TEST(GradientsInPlace, have_the_bits_of_copies_over_micro_batches_that_are_not_reduced) {
  const Body body = [](fsdp::Unit& root, Block& block, int rank) {
    for (int micro = 0; micro < 3; ++micro) {
      root.set_requires_gradient_sync(micro == 2);
      root.call(block, data({2, 3, 7}, 10 * rank + micro)).backward();
    }
  };
  const Outcome copied = outcome(2, {}, mixed_block, body);
  expect_same_bits(outcome(2, {.in_place = GradientsInPlace::kSameBits}, mixed_block, body), copied);
  // The product accumulates by itself: near, and nothing is copied or added but the bias.
  const Outcome always = outcome(2, {.in_place = GradientsInPlace::kAlways}, mixed_block, body);
  EXPECT_EQ(always.bytes.cast_grad, 13 * 4);
  EXPECT_EQ(always.bytes.added, 2 * 13 * 4);
  for (const auto& [name, gradient] : copied.gradients) {
    EXPECT_LE((always.gradients.at(name) - gradient).norm().item<double>(), 1e-6 * gradient.norm().item<double>());
  }
}

TEST(GradientsInPlace, of_lower_precision_are_at_least_as_near_to_the_product) {
  const MakeBlock make = [] {
    return std::make_shared<Block>(
        std::vector<std::vector<int64_t>>{{33, 18}, {6, 18}}, [](Block& b, const at::Tensor& x) {
          const at::Tensor rows = fsdp::embedding(b.p[1], at::tensor({4, 1, 1, 0, 4, 4, 4}, at::kLong));
          return fsdp::linear((x + rows).contiguous(), b.p[0]).sum();
        });
  };
  const Body body = [](fsdp::Unit& root, Block& block, int) { root.call(block, data({7, 18}, 3)).backward(); };
  const Outcome same_bits =
      outcome(2, {.in_place = GradientsInPlace::kSameBits, .param_dtype = at::kBFloat16}, make, body);
  EXPECT_EQ(same_bits.bytes.in_place, (33 + 6) * 18 * 2) << "rounded where they are, as they are reduced";
  EXPECT_EQ(same_bits.bytes.cast_grad, 0);
  const Outcome copied = outcome(2, {.param_dtype = at::kBFloat16}, make, body);
  expect_same_bits(same_bits, copied);
  const Outcome always = outcome(2, {.in_place = GradientsInPlace::kAlways, .param_dtype = at::kBFloat16}, make, body);
  // All tokens bring the embedding the same row, which a sum in fp32 doesn't round.
  const at::Tensor& rows = always.gradients.at("p1");
  EXPECT_TRUE(at::equal(rows[4], rows[0] * 4));
  EXPECT_TRUE(at::equal(rows[1], rows[0] * 2));
  EXPECT_EQ(always.bytes.in_place + always.bytes.cast_grad, 2 * copied.bytes.cast_grad) << "in fp32";
  for (const std::string name : {"p0", "p1"}) {
    const at::Tensor& want = copied.gradients.at(name);
    const double off = (always.gradients.at(name) - want).abs().max().item<double>();
    EXPECT_LE(off, 0.01 * want.abs().max().item<double>()) << name;
  }
}

TEST(GradientsInPlace, of_an_embedding_are_rounded_row_by_row_as_copies_are) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const Index padding : {Index{-1}, Index{3}}) {
      const MakeBlock make = [padding] {
        return std::make_shared<Block>(
            std::vector<std::vector<int64_t>>{{11, 131}}, [padding](Block& b, const at::Tensor& x) {
              const at::Tensor which = at::arange(97, at::kLong).mul(7).add(x.size(0)).remainder(11);
              const at::Tensor rows = fsdp::embedding(b.p[0], which.view({1, 97}), padding);
              return (rows * x.narrow(0, 0, 97)).sum();
            });
      };
      const Body body = [](fsdp::Unit& root, Block& block, int rank) {
        root.call(block, data({97, 131}, 5 + rank)).backward();
      };
      const Outcome copied = outcome(2, {.param_dtype = dtype}, make, body);
      const Outcome in_place = outcome(2, {.in_place = GradientsInPlace::kSameBits, .param_dtype = dtype}, make, body);
      EXPECT_EQ(in_place.bytes.in_place, 11 * 131 * 2);
      expect_same_bits(in_place, copied);
    }
  }
}

// Sizes around the blocks of mixed_gemm.cpp, odd ones, and nothing to sum.
TEST(MixedGemm, rounds_nothing_in_between) {
  const auto gemm = [](Index m, Index k, Index n, bool accumulate) {
    const at::Tensor a = data({k, m}, 1).to(at::kBFloat16);
    const at::Tensor b = data({k, n}, 2).to(at::kBFloat16);
    const at::Tensor before = data({m, n}, 3);
    const at::Tensor whole = at::full({m * n + 16}, -7.0F);  // margins
    const at::Tensor out = whole.narrow(0, 8, m * n).view({m, n});
    out.copy_(before);
    if (!fsdp::mixed_gemm(a.t(), b, out, accumulate)) {
      EXPECT_TRUE(at::equal(out, before));
      return false;
    }
    const at::Tensor product = a.to(at::kDouble).t().mm(b.to(at::kDouble));
    const at::Tensor want = accumulate ? product + before : product;
    EXPECT_LE((out - want).norm().item<double>(), 1e-6 * want.norm().item<double>()) << m << " " << k << " " << n;
    EXPECT_TRUE(at::equal(whole.narrow(0, 0, 8), at::full({8}, -7.0F)));
    EXPECT_TRUE(at::equal(whole.narrow(0, m * n + 8, 8), at::full({8}, -7.0F)));
    return true;
  };
  if (!gemm(4, 2, 4, false)) GTEST_SKIP() << "no bf16 block product on this machine";
  for (const bool accumulate : {false, true}) {
    for (const Index m : {1, 63, 65, 130}) {
      for (const Index k : {1, 2, 37, 255, 257, 513}) {
        for (const Index n : {1, 5, 256, 300}) gemm(m, k, n, accumulate);
      }
    }
  }
  EXPECT_FALSE(gemm(3, 0, 3, false));
  const at::Tensor bf16 = at::ones({3, 3}, at::kBFloat16);
  EXPECT_FALSE(fsdp::mixed_gemm(bf16, bf16, at::ones({3, 3}, at::kBFloat16), false));
  EXPECT_FALSE(fsdp::mixed_gemm(at::ones({3, 3}), at::ones({3, 3}), at::ones({3, 3}), false)) << "that is mm's";
}

TEST(GradientsInPlace, of_a_stack_have_the_bits_of_copies_and_zeros_where_no_row_came) {
  for (const bool bias : {false, true}) {
    for (const std::vector<Index>& counts : {std::vector<Index>{2, 0, 3}, {0, 0, 5}, {5, 0, 0}, {1, 1, 3}, {0, 0, 0}}) {
      const MakeBlock make = [&] {
        return std::make_shared<Block>(
            std::vector<std::vector<int64_t>>{{3, 4, 6}, {3, 4}}, [&](Block& b, const at::Tensor& x) {
              const auto added = bias ? std::optional(b.p[1]) : std::nullopt;
              const Index rows = counts[0] + counts[1] + counts[2];
              return at::tanh(fsdp::grouped_linear(x.narrow(0, 0, rows), b.p[0], added, counts)).sum();
            });
      };
      const Body body = [](fsdp::Unit& root, Block& block, int rank) {
        for (int step = 0; step < 2; ++step) {  // what an earlier step left in the buffer must not show
          root.zero_grad();
          at::Tensor x = data({5, 6}, rank + step).requires_grad_(true);
          root.call(block, x).backward();
          if (x.grad().defined()) {
            EXPECT_EQ(x.grad().sizes(), x.sizes());
          }
        }
      };
      const Outcome copied = outcome(2, {}, make, body);
      const Outcome in_place = outcome(2, {.in_place = GradientsInPlace::kSameBits}, make, body);
      expect_same_bits(in_place, copied);
      if (counts[0] + counts[1] + counts[2] == 0) continue;
      EXPECT_EQ(in_place.bytes.cast_grad, bias ? 2 * 12 * 4 : 0);
      for (Index e = 0; e < 3; ++e) {
        const double norm = in_place.gradients.at("p0")[e].norm().item<double>();
        EXPECT_EQ(norm > 0, counts[static_cast<std::size_t>(e)] > 0);
      }
    }
  }
}

TEST(GradientsInPlace, leave_forward_and_other_gradients_alone) {
  const std::vector<std::vector<int64_t>> shapes{{3, 4}, {2, 3, 4}, {2, 2, 3, 4}, {1, 4}, {3, 1, 4}};
  for (const auto& shape : shapes) {
    for (const bool bias : {false, true}) {
      run_ranks(
          1,
          [&](comm::World& world) {
            const auto with = [&](auto linear) {
              auto block = std::make_shared<Block>(
                  std::vector<std::vector<int64_t>>{{5, 4}, {5}}, [&](Block& b, const at::Tensor& x) {
                    return linear(x, b.p[0], bias ? std::optional(b.p[1]) : std::nullopt);
                  });
              fsdp::FullyShardOptions options;
              options.groups = world.groups(layout::Mesh::shard(1));
              auto root = fsdp::fully_shard(*block, options);
              std::vector<at::Tensor> results;
              for (const bool contiguous : {true, false}) {
                at::Tensor x = data(shape, 5);
                if (!contiguous) x = x.transpose(0, -2).contiguous().transpose(0, -2);
                x.requires_grad_(true);
                const at::Tensor y = root->call(*block, x);
                (y * y).sum().backward();
                results.push_back(y.detach());
                results.push_back(x.grad());
                for (const auto& gradient : root->sharded_gradients()) results.push_back(gradient.local.clone());
                root->zero_grad();
              }
              return results;
            };
            const auto ours = with([](const auto& x, const auto& w, const auto& b) { return fsdp::linear(x, w, b); });
            const auto torchs = with([](const auto& x, const auto& w, const auto& b) { return at::linear(x, w, b); });
            ASSERT_EQ(ours.size(), torchs.size());
            for (std::size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(at::equal(ours[i], torchs[i])) << i;
          },
          quick());
    }
  }
}

// Somebody who asks for a gradient gets it, and no slot is written.
TEST(GradientsInPlace, give_way_to_autograd_grad_and_to_graphs_of_gradients) {
  run_ranks(
      1,
      [](comm::World& world) {
        auto block =
            std::make_shared<Block>(std::vector<std::vector<int64_t>>{{3, 4}}, [](Block& b, const at::Tensor& x) {
              const at::Tensor y = fsdp::linear(x, b.p[0]).square().sum();
              const at::Tensor by_x = torch::autograd::grad({y}, {x}, {}, true, true)[0];
              const at::Tensor by_weight = torch::autograd::grad({y}, {b.p[0]}, {}, true, false)[0];
              EXPECT_TRUE(at::equal(by_weight, (at::linear(x, b.p[0]) * 2).t().mm(x)));
              return by_x.square().sum();
            });
        fsdp::FullyShardOptions options;
        options.groups = world.groups(layout::Mesh::shard(1));
        auto root = fsdp::fully_shard(*block, options);
        const at::Tensor x = data({2, 4}, 1).requires_grad_(true);
        const at::Tensor penalty = root->call(*block, x);
        EXPECT_EQ(root->stats().bytes.in_place, 0);
        penalty.backward();
        const at::Tensor weight = root->sharded_parameters()[0].local.clone().view({3, 4}).requires_grad_(true);
        at::Tensor plain_x = x.detach().clone().requires_grad_(true);
        const at::Tensor y = at::linear(plain_x, weight).square().sum();
        torch::autograd::grad({y}, {plain_x}, {}, true, true)[0].square().sum().backward();
        const at::Tensor got = root->sharded_gradients().at(0).local.view({3, 4});
        EXPECT_TRUE(at::allclose(got, weight.grad(), 1e-6));
      },
      quick());
}

TEST(GradientsInPlace, leave_frozen_weights_alone_and_follow_when_they_thaw) {
  run_ranks(
      2,
      [](comm::World& world) {
        auto block = std::make_shared<Block>(
            std::vector<std::vector<int64_t>>{{4, 4}, {4, 4}},
            [](Block& b, const at::Tensor& x) { return fsdp::linear(fsdp::linear(x, b.p[0]), b.p[1]).sum(); });
        block->p[0].requires_grad_(false);
        fsdp::FullyShardOptions options;
        options.groups = world.groups(layout::Mesh::shard(2));
        auto root = fsdp::fully_shard(*block, options);
        for (const bool thawed : {false, true}) {
          block->p[0].requires_grad_(thawed);
          const Index before = root->stats().bytes.in_place;
          root->call(*block, input_of(world.rank())).backward();
          EXPECT_EQ(root->stats().bytes.in_place - before, (thawed ? 2 : 1) * 16 * 4);
          EXPECT_EQ(root->sharded_gradients().size(), thawed ? 2U : 1U);
          root->zero_grad();
        }
      },
      quick());
}

TEST(GradientsInPlace, survive_a_backward_that_throws) {
  const auto make = [](bool& throws) {
    return std::make_shared<Block>(
        std::vector<std::vector<int64_t>>{{4, 4}, {4, 4}}, [&throws](Block& b, const at::Tensor& x) {
          at::Tensor y = fsdp::linear(x, b.p[0]);
          if (throws) {
            y.register_hook([](const at::Tensor&) { throw std::runtime_error("half way"); });
          }
          return fsdp::linear(y, b.p[1]).sum();
        });
  };
  run_ranks(
      2,
      [&](comm::World& world) {
        bool throws = false;
        auto block = make(throws);
        fsdp::FullyShardOptions options;
        options.groups = world.groups(layout::Mesh::shard(2));
        auto root = fsdp::fully_shard(*block, options);
        const auto step = [&] {
          root->zero_grad();
          root->call(*block, input_of(world.rank())).backward();
        };
        step();
        const auto want = whole_gradients(*root, world.all());
        throws = true;
        EXPECT_ANY_THROW(step());  // p1's gradient is in its slot by then
        throws = false;
        step();
        for (const auto& [name, gradient] : whole_gradients(*root, world.all())) {
          EXPECT_TRUE(at::equal(gradient, want.at(name))) << name;
        }
      },
      quick());
}

TEST(GradientsInPlace, refuse_counts_that_do_not_fit) {
  const at::Tensor stack = at::zeros({2, 3, 4});
  const std::vector<Index> counts{1, 2};
  EXPECT_THROW(fsdp::grouped_linear(at::zeros({2, 4}), stack, {}, counts), InvalidArgument);
  EXPECT_THROW(fsdp::grouped_linear(at::zeros({3, 4}), stack[0], {}, counts), InvalidArgument);
}

}  // namespace
}  // namespace ragged::test
