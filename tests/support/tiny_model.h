// A transformer with awkward sizes: what the parity tests train. Knows nothing of sharding but Shardable.
#pragma once

#include <memory>
#include <vector>

#include <torch/nn/module.h>

#include "ragged/fsdp/unit.h"

namespace ragged::test {

struct TinyConfig {
  int64_t vocab = 13;
  int64_t dim = 12;
  int64_t heads = 2;
  int64_t hidden = 19;
  int layers = 3;
  std::uint64_t seed = 7;
};

struct TinyBlock : torch::nn::Module, fsdp::Shardable {
  explicit TinyBlock(const TinyConfig& config);
  at::Tensor forward(const at::Tensor& x);

  int64_t heads;
  // No bias on keys: its gradient is zero but for rounding, which AdamW would blow up.
  at::Tensor norm, qkv, out, up, up_bias, down, unused;  // `unused` takes part in nothing
};

struct TinyModel : torch::nn::Module, fsdp::Shardable {
  explicit TinyModel(const TinyConfig& config);
  /// tokens, targets: [batch, sequence] of int64. Mean cross-entropy, a scalar in fp32.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets);

  at::Tensor embed, norm, head;
  std::vector<std::shared_ptr<TinyBlock>> layers;
};

/// Same values on every rank, from names and indices.
std::shared_ptr<TinyModel> make_tiny_model(const TinyConfig& config = {});

struct Batch {
  at::Tensor tokens;
  at::Tensor targets;
};
/// A pure function of its arguments.
Batch make_batch(const TinyConfig& config, int step, int rank, int micro_batch);

}  // namespace ragged::test
