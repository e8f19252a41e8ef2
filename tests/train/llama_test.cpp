#include "ragged/train/llama.h"

#include <cmath>
#include <limits>
#include <map>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ragged/fsdp/unit.h"

namespace ragged::train {
namespace {

const ModelConfig kSmall{.dim = 24, .layers = 2, .heads = 6, .kv_heads = 2, .feed_forward = 20, .vocabulary = 256};

std::shared_ptr<Llama> make_model(const ModelConfig& config, double stddev = 0.2) {
  at::manual_seed(3);
  auto model = std::make_shared<Llama>(config, parameters_on(c10::kCPU));
  const at::NoGradGuard no_grad;
  for (const auto& parameter : model->named_parameters()) {
    parameter.value().normal_(parameter.value().dim() == 1 ? 1.0 : 0.0, stddev);
  }
  return model;
}

at::Tensor some_tokens(Index batch, Index sequence) {
  return at::randint(256, {batch, sequence}, at::kLong);
}

// One head at a time, with the definition of attention and of a rotation, in fp64.
at::Tensor attention_twin(Attention& attention, const ModelConfig& config, const at::Tensor& x) {
  const Index head_dim = config.dim_of_head();
  const Index sequence = x.size(1);
  const auto project = [&](const std::shared_ptr<Linear>& linear, const at::Tensor& y) {
    return at::matmul(y, linear->weight.to(at::kDouble).t());
  };
  const auto rotated = [&](const at::Tensor& y) {
    at::Tensor out = y.clone();
    for (Index t = 0; t < sequence; ++t) {
      for (Index i = 0; i < head_dim / 2; ++i) {
        const double angle = static_cast<double>(t) *
            std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
        const at::Tensor a = y.select(1, t).select(-1, i);
        const at::Tensor b = y.select(1, t).select(-1, i + head_dim / 2);
        out.select(1, t).select(-1, i).copy_(a * std::cos(angle) - b * std::sin(angle));
        out.select(1, t).select(-1, i + head_dim / 2).copy_(b * std::cos(angle) + a * std::sin(angle));
      }
    }
    return out;
  };
  const at::Tensor input = x.to(at::kDouble);
  const at::Tensor q = project(attention.q_proj, input);
  const at::Tensor k = project(attention.k_proj, input);
  const at::Tensor v = project(attention.v_proj, input);
  std::vector<at::Tensor> heads;
  for (Index head = 0; head < config.heads; ++head) {
    const Index kv_head = head / (config.heads / config.kv_heads);
    const at::Tensor qh = rotated(q.narrow(-1, head * head_dim, head_dim));
    const at::Tensor kh = rotated(k.narrow(-1, kv_head * head_dim, head_dim));
    const at::Tensor vh = v.narrow(-1, kv_head * head_dim, head_dim);
    at::Tensor scores = at::matmul(qh, kh.transpose(1, 2)) / std::sqrt(static_cast<double>(head_dim));
    const at::Tensor later = at::ones({sequence, sequence}, at::kBool).triu(1);
    scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
    heads.push_back(at::matmul(scores.softmax(-1), vh));
  }
  return project(attention.o_proj, at::cat(heads, -1));
}

TEST(Llama, names_and_shapes_are_those_of_hugging_face) {
  const Llama model(kSmall, parameters_on(c10::kCPU));
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
    expected[layer + "mlp.gate_proj.weight"] = {20, 24};
    expected[layer + "mlp.up_proj.weight"] = {20, 24};
    expected[layer + "mlp.down_proj.weight"] = {24, 20};
  }
  EXPECT_EQ(shapes, expected);
  EXPECT_TRUE(model.named_buffers().is_empty());
}

TEST(Llama, takes_no_memory_on_the_meta_device) {
  const ModelConfig huge{
      .dim = 16384, .layers = 4, .heads = 128, .kv_heads = 8, .feed_forward = 53248, .vocabulary = 128256};
  const Llama model(huge, parameters_on(c10::kMeta));
  for (const auto& parameter : model.parameters()) EXPECT_TRUE(parameter.is_meta());
  EXPECT_GT(parameter_count(model), 10'000'000'000);
}

TEST(Llama, attention_equals_its_definition) {
  const auto model = make_model(kSmall);
  Attention& attention = *model->layers[0]->self_attn;
  const at::Tensor x = at::randn({3, 7, kSmall.dim});
  const at::Tensor expected = attention_twin(attention, kSmall, x);
  const at::Tensor actual = attention.forward(x);
  EXPECT_LT((actual - expected).norm().item<double>() / expected.norm().item<double>(), 1e-6);
}

TEST(Llama, attention_with_equal_heads_equals_its_definition) {
  ModelConfig config = kSmall;
  config.kv_heads = config.heads;
  const auto model = make_model(config);
  Attention& attention = *model->layers[1]->self_attn;
  const at::Tensor x = at::randn({1, 5, config.dim});
  const at::Tensor expected = attention_twin(attention, config, x);
  EXPECT_LT((attention.forward(x) - expected).norm().item<double>() / expected.norm().item<double>(), 1e-6);
}

TEST(Llama, attention_with_heads_of_another_width_equals_its_definition) {
  ModelConfig config = kSmall;
  config.head_dim = 10;
  const auto model = make_model(config);
  Attention& attention = *model->layers[0]->self_attn;
  EXPECT_EQ(attention.q_proj->weight.sizes(), (std::vector<Index>{60, 24}));
  EXPECT_EQ(attention.o_proj->weight.sizes(), (std::vector<Index>{24, 60}));
  const at::Tensor x = at::randn({2, 5, config.dim});
  const at::Tensor expected = attention_twin(attention, config, x);
  EXPECT_LT((attention.forward(x) - expected).norm().item<double>() / expected.norm().item<double>(), 1e-6);
}

TEST(Llama, a_tied_head_is_the_embedding) {
  ModelConfig config = kSmall;
  config.tied_embeddings = true;
  const auto tied = make_model(config);
  EXPECT_EQ(tied->lm_head->weight.unsafeGetTensorImpl(), tied->embed_tokens->weight.unsafeGetTensorImpl());
  EXPECT_EQ(parameter_count(*tied), parameter_count(*make_model(kSmall)) - 256 * 24);
  const auto apart = make_model(kSmall);
  {
    const at::NoGradGuard no_grad;
    for (const auto& parameter : tied->named_parameters()) {
      apart->named_parameters()[parameter.key()].copy_(parameter.value());
    }
  }
  const at::Tensor tokens = some_tokens(2, 9);
  const at::Tensor targets = some_tokens(2, 9);
  EXPECT_TRUE(at::equal(tied->forward_logits(tokens), apart->forward_logits(tokens)));
  tied->forward(tokens, targets).backward();
  apart->forward(tokens, targets).backward();
  const at::Tensor both = apart->embed_tokens->weight.grad() + apart->lm_head->weight.grad();
  EXPECT_LT((tied->embed_tokens->weight.grad() - both).norm().item<double>() / both.norm().item<double>(), 1e-6);
}

TEST(Llama, logits_do_not_depend_on_later_tokens) {
  const auto model = make_model(kSmall);
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = some_tokens(2, 9);
  const at::Tensor before = model->forward_logits(tokens);
  for (Index t = 0; t < 9; ++t) {
    at::Tensor changed = tokens.clone();
    changed.select(1, t).add_(1).remainder_(256);
    const at::Tensor after = model->forward_logits(changed);
    EXPECT_TRUE(at::equal(after.narrow(1, 0, t), before.narrow(1, 0, t))) << "token " << t;
    EXPECT_FALSE(at::allclose(after.select(1, t), before.select(1, t))) << "token " << t;
  }
}

TEST(Llama, depends_on_the_order_of_tokens) {
  const auto model = make_model(kSmall);
  const at::Tensor last = model->forward_logits(at::tensor({5, 6, 7}, at::kLong).unsqueeze(0)).select(1, 2);
  const at::Tensor swapped = model->forward_logits(at::tensor({6, 5, 7}, at::kLong).unsqueeze(0)).select(1, 2);
  EXPECT_FALSE(at::allclose(last, swapped));
}

TEST(Llama, loss_is_the_mean_cross_entropy) {
  const auto model = make_model(kSmall);
  const at::Tensor tokens = some_tokens(2, 6);
  const at::Tensor targets = some_tokens(2, 6);
  const at::Tensor log_p = model->forward_logits(tokens).to(at::kDouble).log_softmax(-1);
  const double expected = -log_p.gather(-1, targets.unsqueeze(-1)).mean().item<double>();
  const at::Tensor loss = model->forward(tokens, targets);
  EXPECT_EQ(loss.dim(), 0);
  EXPECT_NEAR(loss.item<double>(), expected, 1e-5);
}

TEST(Llama, every_parameter_gets_a_gradient) {
  const auto model = make_model(kSmall);
  model->forward(some_tokens(2, 6), some_tokens(2, 6)).backward();
  for (const auto& parameter : model->named_parameters()) {
    ASSERT_TRUE(parameter.value().grad().defined()) << parameter.key();
    EXPECT_GT(parameter.value().grad().abs().max().item<float>(), 0.0f) << parameter.key();
  }
}

TEST(Llama, computes_in_the_dtype_of_its_parameters_and_loses_in_fp32) {
  const auto model = make_model(kSmall);
  const at::Tensor tokens = some_tokens(2, 6);
  const double exact = model->forward(tokens, tokens).item<double>();
  for (auto& parameter : model->parameters()) parameter.set_data(parameter.to(at::kBFloat16));
  EXPECT_EQ(model->forward_logits(tokens).scalar_type(), at::kBFloat16);
  const at::Tensor loss = model->forward(tokens, tokens);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_NEAR(loss.item<double>(), exact, 0.1);
}

TEST(Llama, rotation_keeps_lengths_and_the_first_position) {
  RotaryTable rotary(8, 10000.0);
  const at::Tensor x = at::randn({2, 5, 3, 8});
  const at::Tensor y = rotary.rotate(x);
  EXPECT_TRUE(at::allclose(x.norm(2, -1), y.norm(2, -1)));
  EXPECT_TRUE(at::equal(x.select(1, 0), y.select(1, 0)));
  EXPECT_FALSE(at::allclose(x.select(1, 4), y.select(1, 4)));
}

// A head that points along the first axes comes out as the cosines and sines themselves.
TEST(Llama, stretched_rotation_equals_its_definition) {
  const RotaryStretch stretch{.factor = 8, .low = 1, .high = 4, .original = 64};
  RotaryTable rotary(16, 100.0, stretch);
  const at::Tensor x = at::cat({at::ones({1, 9, 1, 8}), at::zeros({1, 9, 1, 8})}, -1);
  const at::Tensor y = rotary.rotate(x);
  int kept = 0;
  int divided = 0;
  for (int i = 0; i < 8; ++i) {
    double frequency = std::pow(100.0, -2.0 * i / 16.0);
    const double wavelength = 2 * 3.14159265358979323846 / frequency;
    if (wavelength > 64.0 / 1) {
      frequency /= 8;
      ++divided;
    } else if (wavelength >= 64.0 / 4) {
      const double smooth = (64.0 / wavelength - 1) / (4 - 1);
      frequency = (1 - smooth) * frequency / 8 + smooth * frequency;
    } else {
      ++kept;
    }
    for (int t = 0; t < 9; ++t) {
      EXPECT_NEAR(y[0][t][0][i].item<double>(), std::cos(t * frequency), 1e-6) << t << " " << i;
      EXPECT_NEAR(y[0][t][0][i + 8].item<double>(), std::sin(t * frequency), 1e-6) << t << " " << i;
    }
  }
  EXPECT_GT(kept, 0);
  EXPECT_GT(divided, 0);
  EXPECT_LT(kept + divided, 8);
}

TEST(Llama, init_rule_tells_norms_residual_writers_and_the_rest_apart) {
  const fsdp::InitFn rule = init_rule({.layers = 8, .init_std = 0.02});
  const std::vector<Index> vector{4};
  const std::vector<Index> matrix{4, 4};
  EXPECT_EQ(rule("layers.0.input_layernorm.weight", vector).a, 1.0);
  EXPECT_EQ(rule("norm.weight", vector).kind, fsdp::InitRule::Kind::kConstant);
  EXPECT_DOUBLE_EQ(rule("layers.3.self_attn.q_proj.weight", matrix).b, 0.02);
  EXPECT_DOUBLE_EQ(rule("embed_tokens.weight", matrix).b, 0.02);
  EXPECT_DOUBLE_EQ(rule("layers.3.self_attn.o_proj.weight", matrix).b, 0.005);
  EXPECT_DOUBLE_EQ(rule("layers.3.mlp.down_proj.weight", matrix).b, 0.005);
}

}  // namespace
}  // namespace ragged::train
