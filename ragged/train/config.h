// What `ragged train` is told, as plain structs, and its way from TOML and back. Nothing here
// touches torch, a device or the network: a config is checked as a whole before anything is
// allocated.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ragged/base/math.h"
#include "ragged/optim/param_rules.h"

namespace ragged::train {

/// A decoder: Llama-style (llama.h), or with experts in the place of its SwiGLU layers (moe.h).
struct ModelConfig {
  std::string kind = "llama";
  std::string from = {};  // folder of a Hugging Face model whose weights training starts from; empty: random ones
  Index dim = 256;
  Index layers = 4;
  Index heads = 4;
  Index kv_heads = 2;            // must divide heads
  Index head_dim = 0;            // 0: dim / heads
  Index feed_forward = 688;      // of an expert, where there are experts
  Index experts = 8;             // of a layer; moe only, like the next two
  Index experts_per_token = 2;   // at most all
  bool expert_biases = true;     // of router and experts; moe only
  double balance_loss = 0.0;     // see [Note: balance] in moe.h
  Index vocabulary = 256;        // at least 256: tokens are bytes
  bool tied_embeddings = false;  // the head multiplies by the embedding
  double rope_theta = 10000.0;
  double rope_factor =
      1.0;  // see [Note: stretched rotary positions] in llama.h; 1: none, and the next three don't count
  double rope_low_frequency = 1.0;
  double rope_high_frequency = 4.0;  // more than the low one
  Index rope_original_sequence = 8192;
  double norm_eps = 1e-5;
  double init_std = 0.02;

  /// Of one head.
  Index dim_of_head() const { return head_dim > 0 ? head_dim : dim / heads; }
  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;
};

/// Text as bytes; see data.h.
struct DataConfig {
  std::string path = "python-stdlib";
  std::vector<std::string> extensions = {".py"};
  Index max_bytes = 32 << 20;
  Index holdout = 20;  // every so many files one is kept for validation
};

struct TrainConfig {
  Index steps = 100;
  Index batch = 4;       // sequences per rank and micro-batch
  Index sequence = 128;  // tokens per sequence
  Index accumulate = 1;  // micro-batches per step
  bool sync_each_micro_batch = false;
  Index warmup = 10;  // steps
  double lr = 3e-3;
  double min_lr_ratio = 0.1;
  double clip = 1.0;                // largest gradient norm
  std::string nonfinite = "raise";  // or "skip" the step
  Index seed = 1;
  std::string param_dtype = "auto";
  std::string reduce_dtype = "fp32";
  bool activation_checkpointing = false;
  Index log_every = 1;  // steps between console lines
};

struct OptimizerConfig {
  std::string kind = "adamw";
  std::vector<double> betas = {0.9, 0.95};
  double eps = 1e-8;
  double weight_decay = 0.1;
  std::string moment_dtype = "fp32";     // of adamw
  std::string tile_format = "power";     // of adamw8bit
  std::string momentum_format = "fp32";  // of muon, like all that follow
  double momentum = 0.95;
  bool nesterov = true;
  std::string scale = "match_rms_adamw";
  std::string newton_schulz = "keller";
  std::string replicas = "repeat";
  bool normuon = false;
  double row_beta2 = 0.95;
  Index precondition_frequency = 10;  // of soap, like all that follow
  Index max_precondition_dim = 10000;
  std::string wire_dtype = "fp32";
  std::vector<optim::ParamRule> rules = {};  // [[optimizer.rules]]; see param_rules.h
};

struct ParallelConfig {
  Index shard = 0;      // ranks that share one copy of the model; 0: all of them
  Index replicate = 1;  // copies
  bool reshard_after_forward = true;
  Index forward_prefetch = 0;
  Index backward_prefetch = -1;
  Index merge_bytes = -1;
  Index rows = 0;  // rows of a matrix that stay on one rank; 0: no such wish
  std::string collectives = "auto";
  std::string gradients_in_place = "same_bits";
  double timeout_s = 600.0;
};

struct EvalConfig {
  Index every = 0;           // steps; 0: only before the first step and after the last
  Index sequences = 64;      // held-out sequences, over all ranks together
  Index sample_bytes = 240;  // of generated text at the end
  double temperature = 0.7;
};

/// See checkpointing.h. They lie in run.dir/checkpoints.
struct CheckpointConfig {
  Index every = 0;  // steps; 0: never, not at the end either
  Index keep = 2;   // the newest that stay; 0: all
  std::string resume = {};
  bool async = false;
  double timeout_s = 1800.0;  // of writing one
};

struct RunConfig {
  std::string dir = {};  // runs/<name of the config file> when empty
  std::string device = "auto";
};

struct Config {
  ModelConfig model;
  DataConfig data;
  TrainConfig train;
  OptimizerConfig optimizer;
  ParallelConfig parallel;
  EvalConfig eval;
  CheckpointConfig checkpoint;
  RunConfig run;
};

/// Reads a TOML file, then applies overrides of the form "--section.key=value" in order; the last
/// one wins. The rules of an optimizer are written in the file alone. Sets run.dir where it is empty. Throws
/// InvalidArgument that names file, line and key for a missing file, bad TOML, an unknown key (with the nearest known
/// one), a value of another type, or one out of range.
Config load_config(const std::filesystem::path& path, std::span<const std::string> overrides = {});

/// The same over text; `source` stands for the file in messages and run.dir.
Config parse_config(std::string_view toml, std::string_view source, std::span<const std::string> overrides = {});

/// Every key with its value, grouped by section: what load_config reads back to an equal config.
std::string to_toml(const Config& config);

/// One line a key: name, default, meaning.
std::string describe_config_keys();

}  // namespace ragged::train
