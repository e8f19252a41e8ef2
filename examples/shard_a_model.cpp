// The smallest whole program: a model of your own, sharded over whatever torchrun started, trained for a few steps.
//
//     torchrun --nproc-per-node 3 --no-python build/bin/shard_a_model
//
// Not a trainer: ragged/train/trainer.cpp is one.
#include <cstdio>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include "ragged/comm/world.h"
#include "ragged/fsdp/unit.h"
#include "ragged/optim/adamw.h"
#include "ragged/optim/clip_grad.h"

using namespace ragged;

// An ordinary module. Shardable lets its parent call it without knowing whether it is sharded.
struct Block : torch::nn::Module, fsdp::Shardable {
  explicit Block(int64_t width)
      : up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(x))); }

  torch::nn::Linear up, down;
};

struct Model : torch::nn::Module, fsdp::Shardable {
  Model(int64_t width, int depth) : head(register_module("head", torch::nn::Linear(width, 1))) {
    for (int i = 0; i < depth; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<Block>(width)));
    }
  }
  at::Tensor forward(at::Tensor x, const at::Tensor& target) {
    for (const auto& block : blocks) x = fsdp::call(*block, x);
    return at::mse_loss(head(x), target);
  }

  std::vector<std::shared_ptr<Block>> blocks;
  torch::nn::Linear head;
};

int main() try {
  comm::World world = comm::World::connect(comm::rank_env());
  at::manual_seed(1);  // alike on all ranks: each keeps its part of the same values
  auto model = std::make_shared<Model>(/*width=*/32, /*depth=*/3);

  fsdp::FullyShardOptions options;
  options.groups = world.groups(layout::Mesh::shard(world.size()));
  options.shard_policy = [](const fsdp::ParamInfo& p) -> std::optional<plan::Block> {
    if (p.shape.size() < 2) return std::nullopt;
    return plan::rows(std::min<Index>(8, p.shape[0]));  // strips of eight rows stay whole on one rank
  };
  std::vector<std::shared_ptr<fsdp::Unit>> blocks;  // blocks first, the root last
  for (const auto& block : model->blocks) blocks.push_back(fsdp::fully_shard(*block, options));
  auto root = fsdp::fully_shard(*model, options);

  if (world.rank() == 0) {
    const fsdp::StepForecast forecast = root->forecast();
    std::printf(
        "a step will gather %lld bytes and reduce %lld; images will take at most %lld\n",
        static_cast<long long>(forecast.gathered_bytes), static_cast<long long>(forecast.reduced_bytes),
        static_cast<long long>(forecast.image_bytes_bound));
  }

  optim::AdamW adamw(root, {.lr = 1e-2});
  at::manual_seed(static_cast<uint64_t>(100 + world.rank()));  // each rank its own data
  for (int step = 0; step < 20; ++step) {
    const at::Tensor x = at::randn({16, 32});
    const at::Tensor target = at::sin(x.sum(1, /*keepdim=*/true));
    const at::Tensor loss = root->call(*model, x, target);
    loss.backward();
    const double norm = optim::clip_grad_norm(*root, 1.0);
    adamw.step();
    root->zero_grad();
    if (world.rank() == 0 && step % 5 == 4) {
      std::printf("step %2d  loss %.4f  grad norm %.3f\n", step + 1, loss.item<double>(), norm);
    }
  }
  world.all().barrier();
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
