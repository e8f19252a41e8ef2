#include "tests/optim/training.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "ragged/optim/adamw8bit.h"
#include "ragged/optim/clip_grad.h"

namespace ragged::test {
namespace {

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

Tree text_tree(comm::World& world) {
  Tree tree;
  tree.model = make_tiny_model(kModel);
  const at::NoGradGuard no_grad;
  for (const auto& item : tree.model->named_parameters()) {
    if (!item.key().ends_with("norm")) item.value().mul_(0.1);
  }
  fsdp::FullyShardOptions options;
  options.groups = world.groups(layout::Mesh::shard(1));
  options.shard_policy = optim::tile_rows_policy();
  tree.root = fsdp::fully_shard(*tree.model, options);
  return tree;
}

}  // namespace

TextRun train_on_text(
    comm::World& world, const TextTraining& options,
    const std::function<std::unique_ptr<optim::Optimizer>(std::shared_ptr<fsdp::Unit>)>& make) {
  const Tree tree = text_tree(world);
  const auto optimizer = make(tree.root);
  TextRun run;
  for (int step = 1; step <= options.steps; ++step) {
    const Batch batch = text(step);
    tree.root->zero_grad();
    const at::Tensor loss = tree.root->call(*tree.model, batch.tokens, batch.targets);
    loss.backward();
    run.losses.push_back(loss.item<double>());
    optim::clip_grad_norm(*tree.root, 1.0);
    optimizer->set_lr(options.lr * std::min(1.0, step / 40.0));
    optimizer->step();
    if (!std::ranges::count(options.kept_steps, step)) continue;
    std::vector<at::Tensor> parts;
    for (const auto& param : tree.root->sharded_parameters()) parts.push_back(param.local.to(at::kDouble));
    run.params.push_back(at::cat(parts));
  }
  return run;
}

}  // namespace ragged::test
