// Recomputing equals remembering, random numbers included.
#include "ragged/fsdp/activation_checkpoint.h"

#include <gtest/gtest.h>

#include "tests/fsdp/blocks.h"

namespace ragged::test {
namespace {

struct Result {
  at::Tensor output;
  std::map<std::string, at::Tensor> gradients;
  at::Tensor next_random;
};

// Two blocks with dropout, checkpointed or not, as sharded units of a world of one.
Result run(bool checkpointing, bool input_needs_grad) {
  auto model = chain(2);
  for (std::size_t i = 0; i < 2; ++i) {
    model->child(i).function = [](Block& b, const at::Tensor& x) {
      return at::tanh(at::linear(at::dropout(x, 0.4, /*train=*/true), b.p[0]));
    };
  }
  fsdp::FullyShardOptions options;
  options.activation_checkpointing = checkpointing;
  std::vector<std::shared_ptr<fsdp::Unit>> units{
      fsdp::fully_shard(model->child(0), options), fsdp::fully_shard(model->child(1), options)};
  auto root = fsdp::fully_shard(*model, fsdp::FullyShardOptions{});
  at::manual_seed(3);
  const at::Tensor x = input_of(0).requires_grad_(input_needs_grad);
  const at::Tensor loss = root->call(*model, x);
  loss.backward();
  Result result{loss.detach(), {}, at::rand({4})};
  for (const auto& gradient : root->sharded_gradients()) result.gradients[gradient.name] = gradient.local.clone();
  if (input_needs_grad) result.gradients["x"] = x.grad();
  return result;
}

TEST(ActivationCheckpoint, equals_the_plain_run_with_dropout_bit_for_bit) {
  for (const bool input_needs_grad : {false, true}) {
    const Result plain = run(false, input_needs_grad);
    const Result recomputed = run(true, input_needs_grad);
    EXPECT_TRUE(at::equal(plain.output, recomputed.output));
    EXPECT_TRUE(at::equal(plain.next_random, recomputed.next_random)) << "the generator was left elsewhere";
    ASSERT_EQ(plain.gradients.size(), recomputed.gradients.size());
    for (const auto& [name, gradient] : plain.gradients) {
      EXPECT_TRUE(at::equal(gradient, recomputed.gradients.at(name))) << name;
    }
  }
}

TEST(ActivationCheckpoint, keeps_the_structure_of_results_and_passes_other_values_through) {
  const at::Tensor w = at::full({3}, 2.0).requires_grad_(true);
  const at::Tensor x = at::arange(3, at::kFloat).requires_grad_(true);
  std::tuple<at::Tensor, int, std::optional<at::Tensor>> inputs{x, 5, std::nullopt};
  auto forward = [&w](auto& values) {
    const at::Tensor y = std::get<0>(values) * w;
    return std::make_pair(y, std::vector<at::Tensor>{y + std::get<1>(values), y.detach()});
  };
  const auto [y, more] = fsdp::checkpointed(forward, inputs, {w});
  EXPECT_TRUE(at::equal(more[0], y + 5));
  // The node can't know that a result was detached inside; a gradient for it is dropped.
  (more[1].sum() + y.sum() + 3 * more[0].sum()).backward();
  EXPECT_TRUE(at::equal(w.grad(), x.detach() * 4));
  EXPECT_TRUE(at::equal(x.grad(), at::full({3}, 8.0)));
}

TEST(ActivationCheckpoint, runs_forward_once_without_grad_mode) {
  int runs = 0;
  const at::NoGradGuard no_grad;
  std::tuple<at::Tensor> inputs{at::ones({2})};
  fsdp::checkpointed(
      [&runs](auto& values) {
        ++runs;
        return std::get<0>(values) * 2;
      },
      inputs, {});
  EXPECT_EQ(runs, 1);
}

}  // namespace
}  // namespace ragged::test
