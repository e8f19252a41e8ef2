// Gradients that are gathered up where their weights lay: the bits of a buffer of their own, which is taken after all
// where somebody still holds a weight.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ragged/fsdp/gradients_in_place.h"
#include "tests/fsdp/blocks.h"

namespace ragged::test {
namespace {

using fsdp::GradientMemory;
using fsdp::GradientsInPlace;

struct Setting {
  GradientMemory memory = GradientMemory::kOwn;
  GradientsInPlace in_place = GradientsInPlace::kSameBits;
  at::ScalarType param_dtype = at::kFloat;
};

struct Outcome {
  std::map<std::string, at::Tensor> gradients;
  Index peak_reduce = 0;
  Index copied = 0;
};

using Use = std::function<at::Tensor(Block&, const at::Tensor&)>;
using Body = std::function<void(fsdp::Unit& root, Block& model, int rank)>;

void once(fsdp::Unit& root, Block& model, int rank) {
  root.call(model, input_of(rank).requires_grad_(true)).backward();
}

// A root without parameters over one unit of three matrices and a vector.
Outcome outcome(int world_size, const Setting& setting, const Use& use, const Body& body = once) {
  Outcome found;
  run_ranks(
      world_size,
      [&](comm::World& world) {
        auto model = std::make_shared<Block>(std::vector<std::vector<int64_t>>{}, [](Block& b, const at::Tensor& x) {
          return fsdp::call(b.child(0), x * 1.0).to(at::kFloat).mean();
        });
        model->add(
            "unit", std::make_shared<Block>(std::vector<std::vector<int64_t>>{{4, 4}, {4, 4}, {4, 4}, {4}}, use));
        fsdp::FullyShardOptions options;
        options.groups = world.groups(layout::Mesh::shard(world_size));
        options.gradients_in_place = setting.in_place;
        options.gradient_memory = setting.memory;
        options.mixed_precision = {.param_dtype = setting.param_dtype, .reduce_dtype = at::kFloat};
        auto root = shard_chain(*model, 1, options);
        body(*root, *model, world.rank());
        const fsdp::RuntimeStats stats = root->stats();
        EXPECT_EQ(stats.image_bytes_in_use, 0);
        auto gradients = whole_gradients(*root, world.all());
        if (world.rank() != 0) return;
        found = {
            .gradients = std::move(gradients), .peak_reduce = stats.peak_reduce_bytes, .copied = stats.bytes.copied};
      },
      quick());
  return found;
}

void expect_same_bits(const Outcome& got, const Outcome& want) {
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (const auto& [name, gradient] : want.gradients) {
    EXPECT_TRUE(at::equal(got.gradients.at(name), gradient)) << name;
  }
}

at::Tensor each_once(Block& b, const at::Tensor& x) {
  at::Tensor y = at::tanh(fsdp::linear(x, b.p[0]));
  y = at::tanh(fsdp::linear(y, b.p[1], b.p[3]));
  return at::linear(y, b.p[2]);
}

const std::vector<Setting>& settings() {
  static const std::vector<Setting> all{
      {.in_place = GradientsInPlace::kNo},
      {.in_place = GradientsInPlace::kSameBits},
      {.in_place = GradientsInPlace::kNo, .param_dtype = at::kBFloat16},
      {.in_place = GradientsInPlace::kSameBits, .param_dtype = at::kBFloat16}};
  return all;
}

void expect_no_buffer(const Use& use, const Body& body = once) {
  for (const int world_size : {1, 2, 3, 4, 7}) {
    for (Setting setting : settings()) {
      const Outcome own = outcome(world_size, setting, use, body);
      setting.memory = GradientMemory::kOverWeights;
      const Outcome over = outcome(world_size, setting, use, body);
      expect_same_bits(over, own);
      EXPECT_GT(own.peak_reduce, 0);
      EXPECT_EQ(over.peak_reduce, 0);
      EXPECT_EQ(over.copied, 0);
    }
  }
}

// The same bits as ever, in a buffer of its own.
void expect_own_buffer(const Use& use, const Body& body = once, bool in_place_alone = false) {
  for (const int world_size : {1, 2, 3}) {
    for (Setting setting : settings()) {
      if (in_place_alone && setting.in_place == GradientsInPlace::kNo) continue;
      const Outcome own = outcome(world_size, setting, use, body);
      setting.memory = GradientMemory::kOverWeights;
      const Outcome over = outcome(world_size, setting, use, body);
      expect_same_bits(over, own);
      EXPECT_EQ(over.peak_reduce, own.peak_reduce);
    }
  }
}

TEST(OverWeights, takes_no_buffer_where_each_weight_is_used_once) {
  expect_no_buffer(each_once);
}

TEST(OverWeights, takes_no_buffer_where_one_use_follows_another) {
  // Both uses of p[0] are differentiated before its gradient is complete.
  expect_no_buffer([](Block& b, const at::Tensor& x) { return at::linear(at::linear(x, b.p[0]), b.p[0]); });
}

TEST(OverWeights, takes_no_buffer_for_a_parameter_that_nobody_uses) {
  expect_no_buffer([](Block& b, const at::Tensor& x) { return fsdp::linear(x, b.p[1]); });
}

TEST(OverWeights, moves_where_a_weight_is_still_to_be_read) {
  // p[2]'s gradient is complete before the first product's backward reads p[2], of which it gives no gradient.
  expect_own_buffer([](Block& b, const at::Tensor& x) {
    const at::Tensor y = at::tanh(x.mm(b.p[2].detach()));
    return each_once(b, y);
  });
  expect_own_buffer([](Block& b, const at::Tensor& x) {
    const at::Tensor y = at::tanh(at::linear(x, b.p[1].detach().t()));
    return each_once(b, y);
  });
}

TEST(OverWeights, takes_a_buffer_in_the_second_of_two_uses_in_place) {
  // The first addend of p[0] is written while the other use still holds it.
  const Use use = [](Block& b, const at::Tensor& x) { return fsdp::linear(at::tanh(fsdp::linear(x, b.p[0])), b.p[0]); };
  expect_own_buffer(use, once, /*in_place_alone=*/true);
}

TEST(OverWeights, takes_a_buffer_where_the_graph_is_kept) {
  expect_own_buffer(each_once, [](fsdp::Unit& root, Block& model, int rank) {
    const at::Tensor loss = root.call(model, input_of(rank).requires_grad_(true));
    loss.backward({}, /*keep_graph=*/true);
    loss.backward();
  });
}

TEST(OverWeights, takes_a_buffer_for_a_unit_that_runs_twice) {
  const Body body = [](fsdp::Unit& root, Block& model, int rank) {
    const auto x = [&](int step) { return input_of(rank, step).requires_grad_(true); };
    (root.call(model, x(0)) + root.call(model, x(1))).backward();
  };
  expect_own_buffer(each_once, body);
}

TEST(OverWeights, keeps_gradients_that_are_not_reduced_yet_apart) {
  const Body body = [](fsdp::Unit& root, Block& model, int rank) {
    for (int micro = 0; micro < 3; ++micro) {
      root.set_requires_gradient_sync(micro == 2);
      root.call(model, input_of(rank, micro).requires_grad_(true)).backward();
    }
  };
  expect_own_buffer(each_once, body);
}

TEST(OverWeights, starts_over_after_a_backward_that_failed) {
  const Body body = [](fsdp::Unit& root, Block& model, int rank) {
    at::Tensor x = input_of(rank, 1).requires_grad_(true);
    x.register_hook([](const at::Tensor& grad) -> at::Tensor {
      if (grad.defined()) throw std::runtime_error("on purpose");
      return grad;
    });
    EXPECT_THROW(root.call(model, x).backward(), std::runtime_error);
    root.reset();
    root.zero_grad();
    root.call(model, input_of(rank, 0).requires_grad_(true)).backward();
  };
  for (Setting setting : settings()) {
    const Outcome own = outcome(2, setting, each_once, body);
    setting.memory = GradientMemory::kOverWeights;
    expect_same_bits(outcome(2, setting, each_once, body), own);
  }
}

}  // namespace
}  // namespace ragged::test
