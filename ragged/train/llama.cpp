#include "ragged/train/llama.h"

#include <cmath>
#include <numbers>
#include <utility>

#include <ATen/ATen.h>

#include "ragged/fsdp/gradients_in_place.h"
#include "ragged/fsdp/unit.h"

namespace ragged::train {

Linear::Linear(Index in, Index out, const MakeParameter& make)
    : weight(register_parameter("weight", make({out, in}))) {}

at::Tensor Linear::forward(const at::Tensor& x) {
  return fsdp::linear(x, weight);
}

Embedding::Embedding(Index count, Index dim, const MakeParameter& make)
    : weight(register_parameter("weight", make({count, dim}))) {}

at::Tensor Embedding::forward(const at::Tensor& tokens) {
  return fsdp::embedding(weight, tokens);
}

RmsNorm::RmsNorm(Index dim, double eps, const MakeParameter& make)
    : weight(register_parameter("weight", make({dim}))), eps_(eps) {}

at::Tensor RmsNorm::forward(const at::Tensor& x) {
  return at::rms_norm(x, {x.size(-1)}, weight, eps_);
}

RotaryTable::RotaryTable(const ModelConfig& config)
    : RotaryTable(
          config.dim_of_head(), config.rope_theta,
          {.factor = config.rope_factor,
           .low = config.rope_low_frequency,
           .high = config.rope_high_frequency,
           .original = config.rope_original_sequence}) {}

const RotaryTable::Table& RotaryTable::table(Index sequence, c10::Device device) {
  Table& table = tables_[device.str()];
  if (!table.cosines.defined() || table.cosines.size(0) < sequence) {
    const at::NoGradGuard no_grad;
    // In fp64 and on the CPU, so that every device gets the same bits.
    const at::Tensor exponents = at::arange(0, head_dim_, 2, at::kDouble) / head_dim_;
    at::Tensor frequencies = at::pow(theta_, exponents).reciprocal();
    if (stretch_.factor != 1.0) {
      const at::Tensor turns = frequencies * (static_cast<double>(stretch_.original) / (2.0 * std::numbers::pi));
      const at::Tensor kept = ((turns - stretch_.low) / (stretch_.high - stretch_.low)).clamp(0.0, 1.0);
      frequencies = frequencies * (kept + (1.0 - kept) / stretch_.factor);
    }
    const at::Tensor angles = at::outer(at::arange(sequence, at::kDouble), frequencies).unsqueeze(1);
    table.cosines = angles.cos().to(at::kFloat).to(device);
    table.sines = angles.sin().to(at::kFloat).to(device);
  }
  return table;
}

at::Tensor RotaryTable::rotate(const at::Tensor& x) {
  const Index sequence = x.size(1);
  const Table& longest = table(sequence, x.device());
  const at::Tensor cosines = longest.cosines.narrow(0, 0, sequence);
  const at::Tensor sines = longest.sines.narrow(0, 0, sequence);
  const Index half = head_dim_ / 2;
  const at::Tensor first = x.narrow(-1, 0, half);
  const at::Tensor second = x.narrow(-1, half, half);
  return at::cat({first * cosines - second * sines, second * cosines + first * sines}, -1).to(x.scalar_type());
}

Attention::Attention(const ModelConfig& config, std::shared_ptr<RotaryTable> rotary, const MakeParameter& make)
    : heads_(config.heads), kv_heads_(config.kv_heads), head_dim_(config.dim_of_head()), rotary_(std::move(rotary)) {
  const Index q_dim = heads_ * head_dim_;
  const Index kv_dim = kv_heads_ * head_dim_;
  q_proj = register_module("q_proj", std::make_shared<Linear>(config.dim, q_dim, make));
  k_proj = register_module("k_proj", std::make_shared<Linear>(config.dim, kv_dim, make));
  v_proj = register_module("v_proj", std::make_shared<Linear>(config.dim, kv_dim, make));
  o_proj = register_module("o_proj", std::make_shared<Linear>(q_dim, config.dim, make));
}

at::Tensor Attention::forward(const at::Tensor& x) {
  const Index batch = x.size(0);
  const Index sequence = x.size(1);
  const auto by_head = [&](const at::Tensor& t, Index heads) { return t.view({batch, sequence, heads, head_dim_}); };
  const at::Tensor q = rotary_->rotate(by_head(fsdp::call(*q_proj, x), heads_));
  const at::Tensor k = rotary_->rotate(by_head(fsdp::call(*k_proj, x), kv_heads_));
  const at::Tensor v = by_head(fsdp::call(*v_proj, x), kv_heads_);
  const at::Tensor attended = at::scaled_dot_product_attention(
      q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), /*attn_mask=*/{}, /*dropout_p=*/0.0,
      /*is_causal=*/true, /*scale=*/{}, /*enable_gqa=*/kv_heads_ != heads_);
  return fsdp::call(*o_proj, attended.transpose(1, 2).reshape({batch, sequence, heads_ * head_dim_}));
}

SwiGlu::SwiGlu(const ModelConfig& config, const MakeParameter& make) {
  const Index hidden = config.feed_forward;
  gate_proj = register_module("gate_proj", std::make_shared<Linear>(config.dim, hidden, make));
  up_proj = register_module("up_proj", std::make_shared<Linear>(config.dim, hidden, make));
  down_proj = register_module("down_proj", std::make_shared<Linear>(hidden, config.dim, make));
}

at::Tensor SwiGlu::forward(const at::Tensor& x) {
  const at::Tensor gate = at::silu(fsdp::call(*gate_proj, x));
  return fsdp::call(*down_proj, gate * fsdp::call(*up_proj, x));
}

DecoderLayer::DecoderLayer(const ModelConfig& config, std::shared_ptr<RotaryTable> rotary, const MakeParameter& make) {
  const auto make_norm = [&] { return std::make_shared<RmsNorm>(config.dim, config.norm_eps, make); };
  input_layernorm = register_module("input_layernorm", make_norm());
  self_attn = register_module("self_attn", std::make_shared<Attention>(config, std::move(rotary), make));
  post_attention_layernorm = register_module("post_attention_layernorm", make_norm());
  mlp = register_module("mlp", std::make_shared<SwiGlu>(config, make));
}

at::Tensor DecoderLayer::forward(const at::Tensor& x) {
  const at::Tensor h = x + fsdp::call(*self_attn, fsdp::call(*input_layernorm, x));
  return h + fsdp::call(*mlp, fsdp::call(*post_attention_layernorm, h));
}

Llama::Llama(const ModelConfig& config, const MakeParameter& make) : config_(config) {
  const auto rotary = std::make_shared<RotaryTable>(config);
  embed_tokens = register_module("embed_tokens", std::make_shared<Embedding>(config.vocabulary, config.dim, make));
  const auto list = register_module("layers", std::make_shared<ShardableModule>());
  for (Index i = 0; i < config.layers; ++i) {
    layers.push_back(list->register_module(std::to_string(i), std::make_shared<DecoderLayer>(config, rotary, make)));
  }
  norm = register_module("norm", std::make_shared<RmsNorm>(config.dim, config.norm_eps, make));
  lm_head = register_module("lm_head", make_head(config, *embed_tokens, make));
}

at::Tensor Llama::forward_logits(const at::Tensor& tokens) {
  at::Tensor x = fsdp::call(*embed_tokens, tokens);
  for (const auto& layer : layers) x = fsdp::call(*layer, x);
  return fsdp::call(*lm_head, fsdp::call(*norm, x));
}

at::Tensor Llama::forward(const at::Tensor& tokens, const at::Tensor& targets) {
  return mean_cross_entropy(forward_logits(tokens), targets);
}

std::vector<ShardableModule*> Llama::layer_modules() const {
  std::vector<ShardableModule*> modules;
  for (const auto& layer : layers) modules.push_back(layer.get());
  return modules;
}

fsdp::InitFn Llama::init_rule() const {
  return train::init_rule(config_);
}

std::shared_ptr<Linear> make_head(const ModelConfig& config, const Embedding& embedding, const MakeParameter& make) {
  if (!config.tied_embeddings) return std::make_shared<Linear>(config.dim, config.vocabulary, make);
  const MakeParameter same = [&](at::IntArrayRef) { return embedding.weight; };
  return std::make_shared<Linear>(config.dim, config.vocabulary, same);
}

fsdp::InitFn init_rule(const ModelConfig& config) {
  const double residual_std = config.init_std / std::sqrt(2.0 * static_cast<double>(config.layers));
  return [std = config.init_std, residual_std](const std::string& name, std::span<const Index> shape) {
    if (name.ends_with("bias")) return fsdp::constant(0.0);
    if (shape.size() == 1) return fsdp::constant(1.0);
    const bool writes_residual = name.ends_with("o_proj.weight") || name.find("down_proj") != std::string::npos;
    return fsdp::normal(0.0, writes_residual ? residual_std : std);
  };
}

}  // namespace ragged::train
