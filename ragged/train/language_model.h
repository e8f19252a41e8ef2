// What training, evaluation and sampling ask of a model, whatever its layers are made of. Plain torch::nn modules: they
// know nothing of ranks, and whether a child is sharded is decided by fully_shard, not here.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <torch/nn/module.h>

#include "ragged/fsdp/init.h"
#include "ragged/fsdp/shardable.h"
#include "ragged/train/config.h"

namespace ragged::train {

/// Makes an uninitialised fp32 parameter of these sizes.
using MakeParameter = std::function<at::Tensor(at::IntArrayRef sizes)>;
/// With memory, or with sizes alone on the meta device.
MakeParameter parameters_on(c10::Device device);
/// Without memory until the model is sharded and initialised; see fsdp::deferred_parameter.
MakeParameter deferred_parameters(c10::Device device);

/// Any part of a model may become a unit.
class ShardableModule : public torch::nn::Module, public fsdp::Shardable {};

class LanguageModel : public ShardableModule {
 public:
  /// Mean cross-entropy in nats, fp32, 0-dim, plus what the model adds to it. tokens, targets: [batch, sequence] int64.
  virtual at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets) = 0;
  /// [batch, sequence, vocabulary].
  virtual at::Tensor forward_logits(const at::Tensor& tokens) = 0;

  /// The parts that become a unit each, in the order of forward. The model owns them.
  virtual std::vector<ShardableModule*> layer_modules() const = 0;
  /// How parameters start.
  virtual fsdp::InitFn init_rule() const = 0;
};

/// The model as a function from tokens to logits, for a unit to call: root->call(logits, tokens).
struct Logits {
  LanguageModel& model;
  at::Tensor forward(const at::Tensor& tokens) { return model.forward_logits(tokens); }
};

/// Of config.kind.
std::shared_ptr<LanguageModel> make_model(const ModelConfig& config, const MakeParameter& make);

/// In fp32 whatever the layers compute in: the loss is a sum over many small terms.
at::Tensor mean_cross_entropy(const at::Tensor& logits, const at::Tensor& targets);

/// Number of parameters, tied ones once.
Index parameter_count(const torch::nn::Module& module);

}  // namespace ragged::train
