#include "tests/support/tiny_model.h"

#include <ATen/ATen.h>

#include "ragged/fsdp/gradients_in_place.h"

namespace ragged::test {
namespace {

at::Tensor parameter(at::IntArrayRef sizes) {
  return at::zeros(sizes).requires_grad_(true);
}

}  // namespace

TinyBlock::TinyBlock(const TinyConfig& config) : heads(config.heads) {
  const int64_t d = config.dim;
  norm = register_parameter("norm", parameter({d}));
  qkv = register_parameter("qkv", parameter({3 * d, d}));
  out = register_parameter("out", parameter({d, d}));
  up = register_parameter("up", parameter({config.hidden, d}));
  up_bias = register_parameter("up_bias", parameter({config.hidden}));
  down = register_parameter("down", parameter({d, config.hidden}));
  unused = register_parameter("unused", parameter({5, 3}));
}

at::Tensor TinyBlock::forward(const at::Tensor& x) {
  const int64_t batch = x.size(0);
  const int64_t sequence = x.size(1);
  const int64_t d = x.size(2);
  const at::Tensor h = at::rms_norm(x, {d}, norm, 1e-5);
  const at::Tensor parts = fsdp::linear(h, qkv).view({batch, sequence, 3, heads, d / heads}).permute({2, 0, 3, 1, 4});
  const at::Tensor attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
  const at::Tensor y = x + fsdp::linear(attended.transpose(1, 2).reshape({batch, sequence, d}), out);
  return y + fsdp::linear(at::silu(fsdp::linear(y, up, up_bias)), down);
}

TinyModel::TinyModel(const TinyConfig& config) {
  embed = register_parameter("embed", parameter({config.vocab, config.dim}));
  for (int i = 0; i < config.layers; ++i) {
    layers.push_back(register_module("layer" + std::to_string(i), std::make_shared<TinyBlock>(config)));
  }
  norm = register_parameter("norm", parameter({config.dim}));
  head = register_parameter("head", parameter({config.vocab, config.dim}));
}

at::Tensor TinyModel::forward(const at::Tensor& tokens, const at::Tensor& targets) {
  at::Tensor x = fsdp::embedding(embed, tokens);
  for (const auto& layer : layers) x = fsdp::call(*layer, x);
  const at::Tensor logits = fsdp::linear(at::rms_norm(x, {x.size(2)}, norm, 1e-5), head);
  return at::cross_entropy_loss(logits.to(at::kFloat).view({-1, logits.size(2)}), targets.view({-1}));
}

std::shared_ptr<TinyModel> make_tiny_model(const TinyConfig& config) {
  auto model = std::make_shared<TinyModel>(config);
  const at::NoGradGuard no_grad;
  for (const auto& item : model->named_parameters()) {
    const bool is_norm = item.key().ends_with("norm");
    const fsdp::InitRule rule = is_norm ? fsdp::constant(1.0) : fsdp::normal(0.0, 0.3);
    fsdp::fill_initial_values(
        rule, config.seed, item.key(), {0, item.value().numel()}, item.value().mutable_data_ptr<float>());
  }
  return model;
}

Batch make_batch(const TinyConfig& config, int step, int rank, int micro_batch) {
  constexpr int64_t kBatch = 2;
  constexpr int64_t kSequence = 5;
  std::vector<int64_t> ids;
  std::uint64_t state = static_cast<std::uint64_t>(step) * 1000003U + static_cast<std::uint64_t>(rank) * 10007U +
      static_cast<std::uint64_t>(micro_batch) * 101U + 1U;
  for (int64_t i = 0; i < kBatch * (kSequence + 1); ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    ids.push_back(static_cast<int64_t>((state >> 33) % static_cast<std::uint64_t>(config.vocab)));
  }
  const at::Tensor all = at::tensor(ids, at::kLong).view({kBatch, kSequence + 1});
  return {all.narrow(1, 0, kSequence).contiguous(), all.narrow(1, 1, kSequence).contiguous()};
}

}  // namespace ragged::test
