// 8-bit against fp32 states on a small transformer: how far the parameters are apart, which the loss wouldn't show.
#include <cmath>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ragged/optim/adamw.h"
#include "ragged/optim/adamw8bit.h"
#include "ragged/optim/clip_grad.h"
#include "tests/optim/trees.h"

namespace ragged::test {
namespace {

constexpr int kSteps = 100;
constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.95;

const TinyConfig kModel{.vocab = 48, .dim = 64, .heads = 4, .hidden = 144, .layers = 2, .seed = 3};

// Text with something to learn: each letter mostly follows from the last two.
Batch text(int step) {
  constexpr int64_t kBatch = 6;
  constexpr int64_t kSequence = 24;
  std::uint64_t state = static_cast<std::uint64_t>(step) * 1000003U + 5U;
  std::vector<int64_t> ids;
  for (int64_t b = 0; b < kBatch; ++b) {
    std::uint64_t before = 1;
    std::uint64_t last = 2;
    for (int64_t i = 0; i <= kSequence; ++i) {
      state = state * 6364136223846793005U + 1442695040888963407U;
      const std::uint64_t noise = state >> 33;
      const std::uint64_t next = (noise % 4 == 0 ? noise / 4 : before * 5 + last * 7 + 3) % 48;
      before = last;
      last = next;
      ids.push_back(static_cast<int64_t>(next));
    }
  }
  const at::Tensor all = at::tensor(ids, at::kLong).view({kBatch, kSequence + 1});
  return {all.narrow(1, 0, kSequence).contiguous(), all.narrow(1, 1, kSequence).contiguous()};
}

struct Outcome {
  std::vector<double> losses;
  at::Tensor at10, at100;
};

Outcome train(
    comm::World& world, const std::function<std::unique_ptr<optim::Optimizer>(std::shared_ptr<fsdp::Unit>)>& make) {
  Tree tree;
  tree.model = make_tiny_model(kModel);
  {
    const at::NoGradGuard no_grad;
    for (const auto& item : tree.model->named_parameters()) {
      if (!item.key().ends_with("norm")) item.value().mul_(0.1);
    }
  }
  fsdp::FullyShardOptions options;
  options.groups = world.groups(layout::Mesh::shard(1));
  options.shard_policy = optim::tile_rows_policy();
  tree.root = fsdp::fully_shard(*tree.model, options);
  const auto optimizer = make(tree.root);
  const auto all = [&] {
    std::vector<at::Tensor> parts;
    for (const auto& param : tree.root->sharded_parameters()) parts.push_back(param.local.to(at::kDouble));
    return at::cat(parts);
  };
  Outcome run;
  for (int step = 1; step <= kSteps; ++step) {
    const Batch batch = text(step);
    tree.root->zero_grad();
    const at::Tensor loss = tree.root->call(*tree.model, batch.tokens, batch.targets);
    loss.backward();
    run.losses.push_back(loss.item<double>());
    optim::clip_grad_norm(*tree.root, 1.0);
    optimizer->set_lr(1e-3 * std::min(1.0, step / 40.0));
    optimizer->step();
    if (step == 10) run.at10 = all();
  }
  run.at100 = all();
  return run;
}

double distance(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).norm() / b.norm()).item<double>();
}

TEST(AdamW8bitTraining, stays_close_to_fp32_states) {
  run_ranks(
      1,
      [&](comm::World& world) {
        const Outcome plain = train(world, [](std::shared_ptr<fsdp::Unit> root) {
          return std::make_unique<optim::AdamW>(
              root, optim::AdamWOptions{.beta1 = kBeta1, .beta2 = kBeta2, .weight_decay = 0.1});
        });
        EXPECT_LT(plain.losses.back(), plain.losses.front() - 0.2);  // it learns
        for (const std::string format : {"power", "dynamic"}) {
          for (const bool embeddings : {false, true}) {
            const Outcome run = train(world, [&](std::shared_ptr<fsdp::Unit> root) {
              optim::AdamW8bitOptions options{.beta1 = kBeta1, .beta2 = kBeta2, .weight_decay = 0.1};
              options.state_format = format;
              options.policy = [&](const buffer::ShardedTensor& param) {
                optim::ParamSettings settings;
                if (embeddings && (param.name == "embed" || param.name == "head")) settings.state_format = format;
                return settings;
              };
              return std::make_unique<optim::AdamW8bit>(root, options);
            });
            const double at10 = distance(run.at10, plain.at10);
            const double at100 = distance(run.at100, plain.at100);
            const std::string what = format + (embeddings ? ", embeddings too" : "");
            RecordProperty(what, std::to_string(at10) + " " + std::to_string(at100));
            EXPECT_GT(at10, 0.0) << what;  // or it wasn't quantised
            EXPECT_LT(at10, 1e-3) << what;
            EXPECT_LT(at100, 3e-2) << what;
            EXPECT_NEAR(run.losses.back(), plain.losses.back(), 0.06) << what;
          }
        }
      },
      quick(60));
}

}  // namespace
}  // namespace ragged::test
