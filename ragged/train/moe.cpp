#include "ragged/train/moe.h"

#include <string>

#include <ATen/ATen.h>

#include "ragged/fsdp/gradients_in_place.h"
#include "ragged/fsdp/unit.h"

namespace ragged::train {

Router::Router(const ModelConfig& config, const MakeParameter& make)
    : weight(register_parameter("weight", make({config.experts, config.dim}))),
      experts_per_token_(config.experts_per_token),
      balances_(config.balance_loss > 0.0) {
  if (config.expert_biases) bias = register_parameter("bias", make({config.experts}));
}

Routing Router::forward(const at::Tensor& x) {
  const at::Tensor logits = fsdp::linear(x, weight, bias);
  const auto [values, experts] = at::topk(logits, experts_per_token_, -1);
  Routing routing{.experts = experts, .weights = values.softmax(-1, at::kFloat).to(x.scalar_type())};
  if (!balances_) return routing;
  const Index count = weight.size(0);
  const at::Tensor shares = at::bincount(experts.flatten(), {}, count).to(at::kFloat) / experts.numel();
  routing.balance = (shares * logits.softmax(-1, at::kFloat).mean(0)).sum() * count - 1;
  return routing;
}

Experts::Experts(const ModelConfig& config, const MakeParameter& make)
    : gate_up_proj(register_parameter("gate_up_proj", make({config.experts, 2 * config.feed_forward, config.dim}))),
      down_proj(register_parameter("down_proj", make({config.experts, config.dim, config.feed_forward}))) {
  if (!config.expert_biases) return;
  gate_up_proj_bias = register_parameter("gate_up_proj_bias", make({config.experts, 2 * config.feed_forward}));
  down_proj_bias = register_parameter("down_proj_bias", make({config.experts, config.dim}));
}

at::Tensor Experts::forward(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& weights) {
  const Index tokens = x.size(0);
  const Index choices = experts.size(1);
  const Index feed_forward = down_proj.size(-1);

  // Every (token, choice) once, sorted by expert. The sort is stable and no row is read twice, so that neither order
  // nor gradients depend on how a device schedules them.
  const at::Tensor order = std::get<1>(at::sort(experts.flatten(), /*stable=*/true, /*dim=*/0, /*descending=*/false));
  const at::Tensor repeated = x.unsqueeze(1).expand({tokens, choices, x.size(1)}).reshape({tokens * choices, -1});
  const at::Tensor sorted = repeated.index_select(0, order);
  const at::Tensor counted = at::bincount(experts.flatten(), {}, gate_up_proj.size(0)).to(at::kCPU);
  const std::span<const Index> counts(counted.const_data_ptr<Index>(), static_cast<std::size_t>(counted.numel()));

  const at::Tensor hidden = fsdp::grouped_linear(sorted, gate_up_proj, gate_up_proj_bias, counts);
  const at::Tensor gated = at::silu(hidden.narrow(-1, 0, feed_forward)) * hidden.narrow(-1, feed_forward, feed_forward);
  const at::Tensor outputs = fsdp::grouped_linear(gated, down_proj, down_proj_bias, counts);
  const at::Tensor by_choice = outputs.index_select(0, order.argsort()).reshape({tokens, choices, -1});
  return (by_choice * weights.unsqueeze(-1)).sum(1);
}

MoeMlp::MoeMlp(const ModelConfig& config, const MakeParameter& make) {
  router = register_module("router", std::make_shared<Router>(config, make));
  experts = register_module("experts", std::make_shared<Experts>(config, make));
}

std::pair<at::Tensor, std::optional<at::Tensor>> MoeMlp::forward(const at::Tensor& x) {
  const at::Tensor tokens = x.flatten(0, -2);
  const Routing routing = router->forward(tokens);
  const at::Tensor mixed = fsdp::call(*experts, tokens, routing.experts, routing.weights);
  return {mixed.view_as(x), routing.balance};
}

MoeLayer::MoeLayer(const ModelConfig& config, std::shared_ptr<RotaryTable> rotary, const MakeParameter& make) {
  const auto make_norm = [&] { return std::make_shared<RmsNorm>(config.dim, config.norm_eps, make); };
  input_layernorm = register_module("input_layernorm", make_norm());
  self_attn = register_module("self_attn", std::make_shared<Attention>(config, std::move(rotary), make));
  post_attention_layernorm = register_module("post_attention_layernorm", make_norm());
  mlp = register_module("mlp", std::make_shared<MoeMlp>(config, make));
}

std::pair<at::Tensor, std::optional<at::Tensor>> MoeLayer::forward(const at::Tensor& x) {
  const at::Tensor h = x + fsdp::call(*self_attn, fsdp::call(*input_layernorm, x));
  const auto [y, balance] = fsdp::call(*mlp, fsdp::call(*post_attention_layernorm, h));
  return {h + y, balance};
}

MoeDecoder::MoeDecoder(const ModelConfig& config, const MakeParameter& make) : config_(config) {
  const auto rotary = std::make_shared<RotaryTable>(config);
  embed_tokens = register_module("embed_tokens", std::make_shared<Embedding>(config.vocabulary, config.dim, make));
  const auto list = register_module("layers", std::make_shared<ShardableModule>());
  for (Index i = 0; i < config.layers; ++i) {
    layers.push_back(list->register_module(std::to_string(i), std::make_shared<MoeLayer>(config, rotary, make)));
  }
  norm = register_module("norm", std::make_shared<RmsNorm>(config.dim, config.norm_eps, make));
  lm_head = register_module("lm_head", make_head(config, *embed_tokens, make));
}

std::pair<at::Tensor, std::optional<at::Tensor>> MoeDecoder::run(const at::Tensor& tokens) {
  at::Tensor x = fsdp::call(*embed_tokens, tokens);
  std::optional<at::Tensor> balance;
  for (const auto& layer : layers) {
    auto [y, layer_balance] = fsdp::call(*layer, x);
    x = y;
    if (layer_balance) balance = balance ? *balance + *layer_balance : *layer_balance;
  }
  return {fsdp::call(*lm_head, fsdp::call(*norm, x)), balance};
}

at::Tensor MoeDecoder::forward_logits(const at::Tensor& tokens) {
  return run(tokens).first;
}

at::Tensor MoeDecoder::forward(const at::Tensor& tokens, const at::Tensor& targets) {
  const auto [logits, balance] = run(tokens);
  const at::Tensor loss = mean_cross_entropy(logits, targets);
  return balance ? loss + *balance * (config_.balance_loss / static_cast<double>(config_.layers)) : loss;
}

std::vector<ShardableModule*> MoeDecoder::layer_modules() const {
  std::vector<ShardableModule*> modules;
  for (const auto& layer : layers) modules.push_back(layer.get());
  return modules;
}

fsdp::InitFn MoeDecoder::init_rule() const {
  return train::init_rule(config_);
}

}  // namespace ragged::train
