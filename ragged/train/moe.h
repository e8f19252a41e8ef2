// A decoder with a mixture of experts in every layer, in the manner of GPT-OSS: attention as in llama.h, a router with
// a bias, a softmax over the chosen experts alone, and experts as stacked tensors. Names are Hugging Face's for GptOss
// where they fit; what differs, for the sake of optimizers and blocks that see each expert as a matrix:
//
//   mlp.router.weight [experts, dim], .bias [experts]     the same
//   mlp.experts.gate_up_proj [experts, 2 ff, dim]         there [experts, dim, 2 ff]; here gates come first, then ups,
//   mlp.experts.down_proj [experts, dim, ff]              there they alternate
//   mlp.experts.gate_up_proj_bias, .down_proj_bias        the same: [experts, out]
//
// Left out: attention sinks and biases, sliding windows, and the clamp in the activation (this one is plain SwiGLU).
// Without expert_biases the mathematics are Mixtral's, with one tensor for all experts. hf_names.h has both ways there.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ragged/train/llama.h"

namespace ragged::train {

/// Which experts take a token, and how much of each it gets.
struct Routing {
  at::Tensor experts;                   // [tokens, experts_per_token] int64, distinct in a row
  at::Tensor weights;                   // the same shape; a row sums to 1
  std::optional<at::Tensor> balance{};  // see Router; none where nobody asks
};

/// [Note: balance] With E experts, f the share of choices that fell on each, and p the mean of its softmax over all
/// experts: E sum(f p) - 1 (Fedus et al., Switch Transformers, arXiv 2101.03961, eq. 4, less its value at balance).
/// 0 when experts are used alike. f and p are those of this rank's tokens, so that with it equal global batches on
/// other numbers of ranks no longer train alike. Too small to be a unit of its own.
class Router : public torch::nn::Module {
 public:
  Router(const ModelConfig& config, const MakeParameter& make);
  /// x: [tokens, dim].
  Routing forward(const at::Tensor& x);

  at::Tensor weight;  // [experts, dim]
  at::Tensor bias;    // [experts]; undefined without expert_biases, as are those below

 private:
  Index experts_per_token_;
  bool balances_;
};

/// One matrix product an expert that has tokens; one without takes no part in forward, and its gradient is exactly
/// zero.
class Experts : public ShardableModule {
 public:
  Experts(const ModelConfig& config, const MakeParameter& make);
  /// x: [tokens, dim] -> the same: for each token the weighted sum over its experts.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& weights);

  at::Tensor gate_up_proj;       // [experts, 2 ff, dim]
  at::Tensor gate_up_proj_bias;  // [experts, 2 ff]
  at::Tensor down_proj;          // [experts, dim, ff]
  at::Tensor down_proj_bias;     // [experts, dim]
};

/// [batch, sequence, dim] -> the same, and the router's balance.
class MoeMlp : public ShardableModule {
 public:
  MoeMlp(const ModelConfig& config, const MakeParameter& make);
  std::pair<at::Tensor, std::optional<at::Tensor>> forward(const at::Tensor& x);

  std::shared_ptr<Router> router;
  std::shared_ptr<Experts> experts;
};

class MoeLayer : public ShardableModule {
 public:
  MoeLayer(const ModelConfig& config, std::shared_ptr<RotaryTable> rotary, const MakeParameter& make);
  std::pair<at::Tensor, std::optional<at::Tensor>> forward(const at::Tensor& x);

  std::shared_ptr<RmsNorm> input_layernorm;
  std::shared_ptr<Attention> self_attn;
  std::shared_ptr<RmsNorm> post_attention_layernorm;
  std::shared_ptr<MoeMlp> mlp;
};

class MoeDecoder : public LanguageModel {
 public:
  MoeDecoder(const ModelConfig& config, const MakeParameter& make);

  /// Adds config.balance_loss times the mean over layers of the routers' balance.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets) override;
  at::Tensor forward_logits(const at::Tensor& tokens) override;
  std::vector<ShardableModule*> layer_modules() const override;
  fsdp::InitFn init_rule() const override;

  std::shared_ptr<Embedding> embed_tokens;
  std::vector<std::shared_ptr<MoeLayer>> layers;
  std::shared_ptr<RmsNorm> norm;
  std::shared_ptr<Linear> lm_head;

 private:
  std::pair<at::Tensor, std::optional<at::Tensor>> run(const at::Tensor& tokens);

  ModelConfig config_;
};

}  // namespace ragged::train
