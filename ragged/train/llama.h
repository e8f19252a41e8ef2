// A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU; embedding and head are two
// matrices or one. Names and shapes are Hugging Face's (hf_names.h), so that its weights fit.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ragged/train/language_model.h"

namespace ragged::train {

/// y = x W^T; no bias.
class Linear : public ShardableModule {
 public:
  Linear(Index in, Index out, const MakeParameter& make);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;  // [out, in]
};

class Embedding : public ShardableModule {
 public:
  Embedding(Index count, Index dim, const MakeParameter& make);
  /// int64 of any shape -> that shape plus [dim].
  at::Tensor forward(const at::Tensor& tokens);

  at::Tensor weight;  // [count, dim]
};

class RmsNorm : public ShardableModule {
 public:
  RmsNorm(Index dim, double eps, const MakeParameter& make);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;  // [dim]

 private:
  double eps_;
};

/// [Note: stretched rotary positions] Llama 3.1 (Grattafiori et al., The Llama 3 Herd of Models, arXiv 2407.21783, and
/// the code published with it) reaches longer texts than it was first trained on by slowing some frequencies down. Let
/// t be the turns that one makes within the original sequence: with t below `low` it is divided by `factor`, with t
/// above `high` it stays, and between the two it goes over linearly in t.
struct RotaryStretch {
  double factor = 1.0;  // 1: none
  double low = 1.0;
  double high = 4.0;
  Index original = 8192;
};

/// Cosines and sines of the rotary positions, made on first use on the device that asks. They are
/// neither parameters nor buffers: on a model built on the meta device those would stay without
/// values.
class RotaryTable {
 public:
  explicit RotaryTable(const ModelConfig& config);
  RotaryTable(Index head_dim, double theta, RotaryStretch stretch = {})
      : head_dim_(head_dim), theta_(theta), stretch_(stretch) {}
  /// Turns each pair (i, i + head_dim/2) of a head by its position; in fp32, returned in x's dtype.
  /// x: [batch, sequence, heads, head_dim].
  at::Tensor rotate(const at::Tensor& x);

 private:
  struct Table {
    at::Tensor cosines;  // [longest sequence so far, 1, head_dim/2] fp32
    at::Tensor sines;
  };
  const Table& table(Index sequence, c10::Device device);

  Index head_dim_;
  double theta_;
  RotaryStretch stretch_;
  std::map<std::string, Table> tables_;  // by device
};

class Attention : public ShardableModule {
 public:
  Attention(const ModelConfig& config, std::shared_ptr<RotaryTable> rotary, const MakeParameter& make);
  /// Causal. [batch, sequence, dim] -> same.
  at::Tensor forward(const at::Tensor& x);

  std::shared_ptr<Linear> q_proj, k_proj, v_proj, o_proj;

 private:
  Index heads_, kv_heads_, head_dim_;
  std::shared_ptr<RotaryTable> rotary_;
};

class SwiGlu : public ShardableModule {
 public:
  SwiGlu(const ModelConfig& config, const MakeParameter& make);
  at::Tensor forward(const at::Tensor& x);

  std::shared_ptr<Linear> gate_proj, up_proj, down_proj;
};

class DecoderLayer : public ShardableModule {
 public:
  DecoderLayer(const ModelConfig& config, std::shared_ptr<RotaryTable> rotary, const MakeParameter& make);
  at::Tensor forward(const at::Tensor& x);

  std::shared_ptr<RmsNorm> input_layernorm;
  std::shared_ptr<Attention> self_attn;
  std::shared_ptr<RmsNorm> post_attention_layernorm;
  std::shared_ptr<SwiGlu> mlp;
};

class Llama : public LanguageModel {
 public:
  Llama(const ModelConfig& config, const MakeParameter& make);

  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets) override;
  at::Tensor forward_logits(const at::Tensor& tokens) override;
  std::vector<ShardableModule*> layer_modules() const override;
  fsdp::InitFn init_rule() const override;

  std::shared_ptr<Embedding> embed_tokens;
  std::vector<std::shared_ptr<DecoderLayer>> layers;
  std::shared_ptr<RmsNorm> norm;
  std::shared_ptr<Linear> lm_head;

 private:
  ModelConfig config_;
};

/// The head over a vocabulary: a matrix of its own, or the embedding's. Two modules of one unit then hold one
/// parameter.
std::shared_ptr<Linear> make_head(const ModelConfig& config, const Embedding& embedding, const MakeParameter& make);

/// Norms start at 1, biases at 0, matrices normal with init_std, those that write to the residual stream by
/// sqrt(2 layers) smaller, so that its size doesn't grow with depth.
fsdp::InitFn init_rule(const ModelConfig& config);

}  // namespace ragged::train
