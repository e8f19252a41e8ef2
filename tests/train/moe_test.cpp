#include "ragged/train/moe.h"

#include <cmath>
#include <map>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ragged/fsdp/unit.h"

namespace ragged::train {
namespace {

const ModelConfig kSmall{
    .kind = "moe",
    .dim = 24,
    .layers = 2,
    .heads = 6,
    .kv_heads = 2,
    .feed_forward = 10,
    .experts = 5,
    .experts_per_token = 2};

std::shared_ptr<MoeDecoder> make_model(const ModelConfig& config) {
  at::manual_seed(3);
  auto model = std::make_shared<MoeDecoder>(config, parameters_on(c10::kCPU));
  const at::NoGradGuard no_grad;
  for (const auto& parameter : model->parameters()) parameter.normal_(0.0, 0.3);
  return model;
}

at::Tensor some_tokens(Index batch, Index sequence) {
  return at::randint(256, {batch, sequence}, at::kLong);
}

// One token and one expert at a time, by the definition, in fp64, on leaves of its own.
struct Twin {
  explicit Twin(const MoeMlp& mlp) {
    for (const auto& parameter : mlp.named_parameters()) {
      leaves[parameter.key()] = parameter.value().detach().to(at::kDouble).requires_grad_();
    }
  }

  at::Tensor forward(const at::Tensor& x, Index experts_per_token) {
    const Index feed_forward = leaves.at("experts.down_proj").size(-1);
    std::vector<at::Tensor> outputs;
    for (const at::Tensor& token : x.flatten(0, -2).to(at::kDouble).unbind(0)) {
      const at::Tensor logits = at::mv(leaves.at("router.weight"), token) + leaves.at("router.bias");
      const at::Tensor order = logits.detach().argsort(0, /*descending=*/true);
      at::Tensor total = at::zeros({}, at::kDouble);
      for (Index i = 0; i < experts_per_token; ++i) total = total + logits[order[i].item<Index>()].exp();
      at::Tensor output = at::zeros_like(token);
      for (Index i = 0; i < experts_per_token; ++i) {
        const Index e = order[i].item<Index>();
        const at::Tensor hidden =
            at::mv(leaves.at("experts.gate_up_proj")[e], token) + leaves.at("experts.gate_up_proj_bias")[e];
        const at::Tensor gate = hidden.narrow(0, 0, feed_forward);
        const at::Tensor gated = gate * gate.sigmoid() * hidden.narrow(0, feed_forward, feed_forward);
        const at::Tensor part =
            at::mv(leaves.at("experts.down_proj")[e], gated) + leaves.at("experts.down_proj_bias")[e];
        output = output + part * logits[e].exp() / total;
      }
      outputs.push_back(output);
    }
    return at::stack(outputs).view_as(x);
  }

  std::map<std::string, at::Tensor> leaves;
};

// With one choice a token, the router's gradients are zero but for rounding: then the difference itself.
double relative(const at::Tensor& actual, const at::Tensor& expected) {
  const double scale = expected.norm().item<double>();
  return (actual.to(at::kDouble) - expected).norm().item<double>() / (scale > 1e-9 ? scale : 1.0);
}

// Values and all gradients of one layer's experts against the twin's.
void expect_equals_twin(MoeMlp& mlp, const ModelConfig& config, const at::Tensor& input) {
  Twin twin(mlp);
  const at::Tensor x = input.detach().clone().requires_grad_();
  const at::Tensor twin_x = input.detach().to(at::kDouble).requires_grad_();
  const at::Tensor actual = mlp.forward(x).first;
  const at::Tensor expected = twin.forward(twin_x, config.experts_per_token);
  ASSERT_EQ(actual.sizes(), expected.sizes());
  EXPECT_LT(relative(actual, expected), 1e-6);

  const at::Tensor direction = at::randn(actual.sizes());
  (actual * direction).sum().backward();
  (expected * direction.to(at::kDouble)).sum().backward();
  EXPECT_LT(relative(x.grad(), twin_x.grad()), 1e-5);
  for (const auto& parameter : mlp.named_parameters()) {
    const at::Tensor twin_grad = twin.leaves.at(parameter.key()).grad();
    ASSERT_TRUE(parameter.value().grad().defined()) << parameter.key();
    ASSERT_TRUE(twin_grad.defined()) << parameter.key();
    EXPECT_LT(relative(parameter.value().grad(), twin_grad), 1e-5) << parameter.key();
  }
}

TEST(Moe, names_and_shapes_are_as_documented) {
  const MoeDecoder model(kSmall, parameters_on(c10::kMeta));
  std::map<std::string, std::vector<Index>> shapes;
  for (const auto& parameter : model.named_parameters()) {
    shapes[parameter.key()] = parameter.value().sizes().vec();
  }
  std::map<std::string, std::vector<Index>> expected{
      {"embed_tokens.weight", {256, 24}}, {"norm.weight", {24}}, {"lm_head.weight", {256, 24}}};
  for (const std::string layer : {"layers.0.", "layers.1."}) {
    expected[layer + "input_layernorm.weight"] = {24};
    expected[layer + "post_attention_layernorm.weight"] = {24};
    expected[layer + "self_attn.q_proj.weight"] = {24, 24};
    expected[layer + "self_attn.k_proj.weight"] = {8, 24};
    expected[layer + "self_attn.v_proj.weight"] = {8, 24};
    expected[layer + "self_attn.o_proj.weight"] = {24, 24};
    expected[layer + "mlp.router.weight"] = {5, 24};
    expected[layer + "mlp.router.bias"] = {5};
    expected[layer + "mlp.experts.gate_up_proj"] = {5, 20, 24};
    expected[layer + "mlp.experts.gate_up_proj_bias"] = {5, 20};
    expected[layer + "mlp.experts.down_proj"] = {5, 24, 10};
    expected[layer + "mlp.experts.down_proj_bias"] = {5, 24};
  }
  EXPECT_EQ(shapes, expected);
}

TEST(Moe, experts_equal_their_definition) {
  for (const Index experts_per_token : {1, 2, 5}) {
    SCOPED_TRACE(experts_per_token);
    ModelConfig config = kSmall;
    config.experts_per_token = experts_per_token;
    const auto model = make_model(config);
    expect_equals_twin(*model->layers[0]->mlp, config, at::randn({3, 7, config.dim}));
  }
}

TEST(Moe, one_expert_equals_its_definition) {
  ModelConfig config = kSmall;
  config.experts = 1;
  config.experts_per_token = 1;
  expect_equals_twin(*make_model(config)->layers[0]->mlp, config, at::randn({1, 4, config.dim}));
}

TEST(Moe, without_biases_is_with_biases_of_zero) {
  const auto with = make_model(kSmall);
  ModelConfig config = kSmall;
  config.expert_biases = false;
  config.tied_embeddings = true;
  const auto without = make_model(config);
  {
    const at::NoGradGuard no_grad;
    const auto source = without->named_parameters();
    for (const auto& parameter : with->named_parameters()) {
      const at::Tensor* value = source.find(parameter.key());
      EXPECT_EQ(value == nullptr, parameter.key().ends_with("bias")) << parameter.key();
      value ? parameter.value().copy_(*value) : parameter.value().zero_();
    }
  }
  const at::Tensor tokens = some_tokens(3, 7);
  const at::Tensor expected = with->forward_logits(tokens);
  EXPECT_LT(relative(without->forward_logits(tokens), expected), 1e-6);
}

TEST(Moe, experts_without_tokens_change_nothing_and_get_zero_gradients) {
  const auto model = make_model(kSmall);
  MoeMlp& mlp = *model->layers[1]->mlp;
  {
    const at::NoGradGuard no_grad;
    mlp.router->bias[1].fill_(-1e4);  // nobody chooses these
    mlp.router->bias[4].fill_(-1e4);
    mlp.experts->gate_up_proj[1].fill_(NAN);  // and what they would compute shows nowhere
  }
  const at::Tensor x = at::randn({2, 3, kSmall.dim}).requires_grad_();
  const at::Tensor y = mlp.forward(x).first;
  EXPECT_TRUE(at::isfinite(y).all().item<bool>());
  y.square().sum().backward();
  EXPECT_TRUE(at::isfinite(x.grad()).all().item<bool>());
  for (const at::Tensor& stacked : mlp.experts->parameters()) {
    for (const Index expert : {1, 4}) EXPECT_EQ(stacked.grad()[expert].count_nonzero().item<Index>(), 0);
    for (const Index expert : {0, 2, 3}) EXPECT_GT(stacked.grad()[expert].count_nonzero().item<Index>(), 0);
  }
}

TEST(Moe, one_token_goes_to_its_experts) {
  expect_equals_twin(*make_model(kSmall)->layers[0]->mlp, kSmall, at::randn({1, 1, kSmall.dim}));
}

TEST(Moe, balance_is_zero_where_experts_are_used_alike_and_largest_where_one_takes_all) {
  ModelConfig config = kSmall;
  config.balance_loss = 1.0;
  config.experts_per_token = 1;
  const auto model = make_model(config);
  Router& router = *model->layers[0]->mlp->router;
  const at::NoGradGuard no_grad;
  router.weight.zero_();
  router.bias.zero_();
  for (Index e = 0; e < config.experts; ++e) router.weight[e][e] = 50.0;  // a token chooses its own coordinate
  const at::Tensor one_each = at::eye(config.experts, config.dim);
  EXPECT_NEAR(router.forward(one_each).balance->item<double>(), 0.0, 1e-5);
  const at::Tensor all_first = one_each[0].expand({7, config.dim});
  EXPECT_NEAR(router.forward(all_first).balance->item<double>(), 4.0, 1e-5);  // experts - 1
}

TEST(Moe, balance_is_added_to_the_loss_alone) {
  ModelConfig config = kSmall;
  config.balance_loss = 0.5;
  const auto balanced = make_model(config);
  const auto plain = make_model(kSmall);
  const at::Tensor tokens = some_tokens(2, 6);
  EXPECT_TRUE(at::equal(balanced->forward_logits(tokens), plain->forward_logits(tokens)));
  double balance = 0.0;
  at::Tensor x = balanced->embed_tokens->forward(tokens);
  for (const auto& layer : balanced->layers) {
    const at::Tensor h = x + layer->self_attn->forward(layer->input_layernorm->forward(x));
    const at::Tensor routed = layer->post_attention_layernorm->forward(h).flatten(0, 1);
    balance += layer->mlp->router->forward(routed).balance->item<double>();
    x = layer->forward(x).first;
  }
  EXPECT_GT(balance, 0.01);
  EXPECT_NEAR(
      balanced->forward(tokens, tokens).item<double>(),
      plain->forward(tokens, tokens).item<double>() + 0.5 * balance / 2.0, 1e-5);
  EXPECT_FALSE(plain->layers[0]->mlp->router->forward(at::randn({4, config.dim})).balance);
}

// f is a count, so only p carries gradient: compare with differences of the loss in the router's bias.
TEST(Moe, balance_gradient_is_that_of_the_mean_probabilities) {
  ModelConfig config = kSmall;
  config.balance_loss = 1.0;
  const auto model = make_model(config);
  Router& router = *model->layers[0]->mlp->router;
  const at::Tensor x = at::randn({40, config.dim});
  const Routing routing = router.forward(x);
  routing.balance->backward();
  const at::Tensor shares = at::bincount(routing.experts.flatten(), {}, config.experts).to(at::kDouble) /
      static_cast<double>(routing.experts.numel());
  const auto balance_at = [&](const at::Tensor& bias) {
    const at::Tensor p = at::linear(x.to(at::kDouble), router.weight.to(at::kDouble), bias).softmax(-1).mean(0);
    return static_cast<double>(config.experts) * at::dot(shares, p).item<double>();
  };
  const at::NoGradGuard no_grad;
  for (Index e = 0; e < config.experts; ++e) {
    at::Tensor up = router.bias.to(at::kDouble).clone();
    at::Tensor down = up.clone();
    up[e] += 1e-4;
    down[e] -= 1e-4;
    const double slope = (balance_at(up) - balance_at(down)) / 2e-4;
    EXPECT_NEAR(router.bias.grad()[e].item<double>(), slope, 1e-5) << e;
  }
}

TEST(Moe, logits_do_not_depend_on_later_tokens) {
  const auto model = make_model(kSmall);
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = some_tokens(2, 9);
  const at::Tensor before = model->forward_logits(tokens);
  for (Index t = 0; t < 9; ++t) {
    at::Tensor changed = tokens.clone();
    changed.select(1, t).add_(1).remainder_(256);
    const at::Tensor after = model->forward_logits(changed);
    EXPECT_TRUE(at::allclose(after.narrow(1, 0, t), before.narrow(1, 0, t), 1e-5, 1e-5)) << "token " << t;
    EXPECT_FALSE(at::allclose(after.select(1, t), before.select(1, t))) << "token " << t;
  }
}

TEST(Moe, computes_in_the_dtype_of_its_parameters_and_loses_in_fp32) {
  const auto model = make_model(kSmall);
  for (auto& parameter : model->parameters()) parameter.set_data(parameter.to(at::kBFloat16));
  const at::Tensor tokens = some_tokens(2, 6);
  EXPECT_EQ(model->forward_logits(tokens).scalar_type(), at::kBFloat16);
  EXPECT_EQ(model->forward(tokens, tokens).scalar_type(), at::kFloat);
}

TEST(Moe, init_rule_starts_biases_at_zero_and_residual_writers_small) {
  const MoeDecoder model({.kind = "moe", .layers = 8, .init_std = 0.02}, parameters_on(c10::kMeta));
  const fsdp::InitFn rule = model.init_rule();
  const std::vector<Index> vector{4};
  const std::vector<Index> matrix{4, 4};
  const std::vector<Index> stack{2, 4, 4};
  EXPECT_EQ(rule("layers.0.mlp.router.bias", vector).a, 0.0);
  EXPECT_EQ(rule("layers.0.mlp.experts.down_proj_bias", matrix).kind, fsdp::InitRule::Kind::kConstant);
  EXPECT_EQ(rule("layers.0.input_layernorm.weight", vector).a, 1.0);
  EXPECT_DOUBLE_EQ(rule("layers.0.mlp.experts.gate_up_proj", stack).b, 0.02);
  EXPECT_DOUBLE_EQ(rule("layers.0.mlp.experts.down_proj", stack).b, 0.005);
}

TEST(Moe, make_model_follows_the_kind) {
  ModelConfig config = kSmall;
  EXPECT_TRUE(std::dynamic_pointer_cast<MoeDecoder>(make_model(config, parameters_on(c10::kMeta))));
  config.kind = "llama";
  EXPECT_TRUE(std::dynamic_pointer_cast<Llama>(make_model(config, parameters_on(c10::kMeta))));
  config.kind = "mamba";
  EXPECT_THROW(make_model(config, parameters_on(c10::kMeta)), InvalidArgument);
}

}  // namespace
}  // namespace ragged::train
