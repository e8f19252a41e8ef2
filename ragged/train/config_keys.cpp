#include "ragged/train/config_keys.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ragged/base/text.h"

namespace ragged::train {
namespace {

constexpr double kNone = std::numeric_limits<double>::infinity();

constexpr std::string_view kModelKinds[] = {"llama", "moe"};
constexpr std::string_view kComputeDtypes[] = {"auto", "fp32", "bf16"};
constexpr std::string_view kDtypes[] = {"fp32", "bf16"};
constexpr std::string_view kTileFormats[] = {"power", "dynamic"};
constexpr std::string_view kMomentumFormats[] = {"fp32", "bf16", "power", "dynamic"};
constexpr std::string_view kMuonScales[] = {"original", "match_rms_adamw"};
constexpr std::string_view kNewtonSchulz[] = {"keller", "you", "polar_express", "cushioned", "deepseek_v4"};
constexpr std::string_view kReplicas[] = {"repeat", "share"};
constexpr std::string_view kOnNonfinite[] = {"raise", "skip"};
constexpr std::string_view kCollectives[] = {"auto", "stock"};
constexpr std::string_view kGradientsInPlace[] = {"same_bits", "always", "no"};
constexpr std::string_view kDevices[] = {"auto", "cpu", "cuda"};

#define SLOT(member) [](Config& c) -> ConfigSlot { return &c.member; }

std::vector<ConfigKey> make_keys() {
  return {
      {.name = "model.kind",
       .slot = SLOT(model.kind),
       .help = "llama, or moe: experts in the place of SwiGLU layers",
       .choices = kModelKinds},
      {.name = "model.from",
       .slot = SLOT(model.from),
       .help = "folder of a Hugging Face model to start from, see `ragged import`; a resumed checkpoint goes before"},
      {.name = "model.dim", .slot = SLOT(model.dim), .help = "width of the model", .min = 1},
      {.name = "model.layers", .slot = SLOT(model.layers), .help = "decoder layers", .min = 1},
      {.name = "model.heads", .slot = SLOT(model.heads), .help = "query heads", .min = 1},
      {.name = "model.kv_heads", .slot = SLOT(model.kv_heads), .help = "key and value heads; divides heads", .min = 1},
      {.name = "model.head_dim", .slot = SLOT(model.head_dim), .help = "width of a head; 0: dim / heads", .min = 0},
      {.name = "model.feed_forward",
       .slot = SLOT(model.feed_forward),
       .help = "hidden width of the SwiGLU layer, or of an expert",
       .min = 1},
      {.name = "model.experts", .slot = SLOT(model.experts), .help = "experts of a layer; moe only", .min = 1},
      {.name = "model.experts_per_token",
       .slot = SLOT(model.experts_per_token),
       .help = "experts that a token goes to; moe only",
       .min = 1},
      {.name = "model.expert_biases",
       .slot = SLOT(model.expert_biases),
       .help = "biases of routers and experts, as GPT-OSS has and Mixtral hasn't; moe only"},
      {.name = "model.balance_loss",
       .slot = SLOT(model.balance_loss),
       .help = "weight of the loss that evens out the experts' use; moe only",
       .min = 0},
      {.name = "model.vocabulary",
       .slot = SLOT(model.vocabulary),
       .help = "tokens; the first 256 are the bytes",
       .min = 256},
      {.name = "model.tied_embeddings",
       .slot = SLOT(model.tied_embeddings),
       .help = "embedding and head are one matrix"},
      {.name = "model.rope_theta", .slot = SLOT(model.rope_theta), .help = "base of the rotary frequencies", .min = 1},
      {.name = "model.rope_factor",
       .slot = SLOT(model.rope_factor),
       .help = "slow rotary frequencies are divided by it, as in Llama 3.1; 1: none",
       .min = 0,
       .min_excluded = true},
      {.name = "model.rope_low_frequency",
       .slot = SLOT(model.rope_low_frequency),
       .help = "turns within rope_original_sequence below which a frequency is slow",
       .min = 0,
       .min_excluded = true},
      {.name = "model.rope_high_frequency",
       .slot = SLOT(model.rope_high_frequency),
       .help = "turns above which it is left as it is",
       .min = 0,
       .min_excluded = true},
      {.name = "model.rope_original_sequence",
       .slot = SLOT(model.rope_original_sequence),
       .help = "tokens that the model was made for before",
       .min = 1},
      {.name = "model.norm_eps", .slot = SLOT(model.norm_eps), .help = "added to the mean square in RMSNorm", .min = 0},
      {.name = "model.init_std",
       .slot = SLOT(model.init_std),
       .help = "standard deviation of initial weights",
       .min = 0},

      {.name = "data.path",
       .slot = SLOT(data.path),
       .help = "a file, a folder, or python-stdlib: the source of Python's standard library"},
      {.name = "data.extensions", .slot = SLOT(data.extensions), .help = "files of a folder that are read; empty: all"},
      {.name = "data.max_bytes",
       .slot = SLOT(data.max_bytes),
       .help = "text beyond this many bytes is left out",
       .min = 1},
      {.name = "data.holdout",
       .slot = SLOT(data.holdout),
       .help = "one file in so many is kept for validation",
       .min = 2},

      {.name = "train.steps", .slot = SLOT(train.steps), .help = "optimizer steps", .min = 1},
      {.name = "train.batch", .slot = SLOT(train.batch), .help = "sequences per rank and micro-batch", .min = 1},
      {.name = "train.sequence", .slot = SLOT(train.sequence), .help = "tokens per sequence", .min = 1},
      {.name = "train.accumulate", .slot = SLOT(train.accumulate), .help = "micro-batches per step", .min = 1},
      {.name = "train.sync_each_micro_batch",
       .slot = SLOT(train.sync_each_micro_batch),
       .help = "reduce gradients in every micro-batch, not only in the last: less memory, more "
               "traffic"},
      {.name = "train.warmup",
       .slot = SLOT(train.warmup),
       .help = "steps until the learning rate is reached",
       .min = 0},
      {.name = "train.lr", .slot = SLOT(train.lr), .help = "largest learning rate", .min = 0, .min_excluded = true},
      {.name = "train.min_lr_ratio",
       .slot = SLOT(train.min_lr_ratio),
       .help = "learning rate of the last step over the largest",
       .min = 0,
       .max = 1},
      {.name = "train.clip",
       .slot = SLOT(train.clip),
       .help = "largest norm of the gradients; above it they are scaled down",
       .min = 0,
       .min_excluded = true},
      {.name = "train.nonfinite",
       .slot = SLOT(train.nonfinite),
       .help = "what a loss or gradient norm that isn't finite does: stop the run, or skip the step",
       .choices = kOnNonfinite},
      {.name = "train.seed", .slot = SLOT(train.seed), .help = "of initial values, data order and samples", .min = 0},
      {.name = "train.param_dtype",
       .slot = SLOT(train.param_dtype),
       .help = "of gathered parameters and compute; auto: bf16 where the hardware has it",
       .choices = kComputeDtypes},
      {.name = "train.reduce_dtype",
       .slot = SLOT(train.reduce_dtype),
       .help = "of gradients on the wire",
       .choices = kDtypes},
      {.name = "train.activation_checkpointing",
       .slot = SLOT(train.activation_checkpointing),
       .help = "keep no activations of layers, compute them again in backward"},
      {.name = "train.log_every", .slot = SLOT(train.log_every), .help = "steps between console lines", .min = 1},

      {.name = "optimizer.kind",
       .slot = SLOT(optimizer.kind),
       .help = "the optimizer, for what no rule sends elsewhere",
       .choices = optim::optimizer_kinds()},
      {.name = "optimizer.betas",
       .slot = SLOT(optimizer.betas),
       .help = "decay of the two moments",
       .min = 0,
       .max = 1,
       .max_excluded = true,
       .length = 2},
      {.name = "optimizer.eps",
       .slot = SLOT(optimizer.eps),
       .help = "added to the root of the second moment",
       .min = 0,
       .min_excluded = true},
      {.name = "optimizer.weight_decay",
       .slot = SLOT(optimizer.weight_decay),
       .help = "of parameters with two dims and more",
       .min = 0},
      {.name = "optimizer.moment_dtype",
       .slot = SLOT(optimizer.moment_dtype),
       .help = "of the two moments of adamw",
       .choices = kDtypes},
      {.name = "optimizer.tile_format",
       .slot = SLOT(optimizer.tile_format),
       .help = "codes of the moments of adamw8bit; dynamic: those of bitsandbytes",
       .choices = kTileFormats},
      {.name = "optimizer.momentum_format",
       .slot = SLOT(optimizer.momentum_format),
       .help = "of the momentum of muon; power and dynamic: 8 bits in tiles, with the codes of adamw8bit",
       .choices = kMomentumFormats},
      {.name = "optimizer.momentum",
       .slot = SLOT(optimizer.momentum),
       .help = "decay of the momentum of muon",
       .min = 0,
       .max = 1,
       .max_excluded = true},
      {.name = "optimizer.nesterov", .slot = SLOT(optimizer.nesterov), .help = "of muon: look one step ahead"},
      {.name = "optimizer.scale",
       .slot = SLOT(optimizer.scale),
       .help = "length of updates of muon; match_rms_adamw: that of AdamW at the same learning rate",
       .choices = kMuonScales},
      {.name = "optimizer.newton_schulz",
       .slot = SLOT(optimizer.newton_schulz),
       .help = "coefficients of the iteration of muon",
       .choices = kNewtonSchulz},
      {.name = "optimizer.replicas",
       .slot = SLOT(optimizer.replicas),
       .help = "of muon: copies of the model repeat the work, or share it for one more collective a bucket",
       .choices = kReplicas},
      {.name = "optimizer.normuon",
       .slot = SLOT(optimizer.normuon),
       .help = "of muon: even out the rows of its updates (NorMuon)"},
      {.name = "optimizer.row_beta2",
       .slot = SLOT(optimizer.row_beta2),
       .help = "decay of the second moments of rows, with normuon",
       .min = 0,
       .max = 1,
       .max_excluded = true},
      {.name = "optimizer.precondition_frequency",
       .slot = SLOT(optimizer.precondition_frequency),
       .help = "of soap: steps from one basis to the next",
       .min = 1},
      {.name = "optimizer.max_precondition_dim",
       .slot = SLOT(optimizer.max_precondition_dim),
       .help = "of soap: a longer side of a matrix has no basis",
       .min = 0},
      {.name = "optimizer.wire_dtype",
       .slot = SLOT(optimizer.wire_dtype),
       .help = "of gradients and updates of soap between ranks",
       .choices = kDtypes},

      {.name = "parallel.shard",
       .slot = SLOT(parallel.shard),
       .help = "ranks that share one copy of the model; 0: all that replicate leaves",
       .min = 0},
      {.name = "parallel.replicate", .slot = SLOT(parallel.replicate), .help = "copies of the model", .min = 1},
      {.name = "parallel.reshard_after_forward",
       .slot = SLOT(parallel.reshard_after_forward),
       .help = "drop gathered layers after forward, gather them again in backward"},
      {.name = "parallel.forward_prefetch",
       .slot = SLOT(parallel.forward_prefetch),
       .help = "layers gathered ahead in forward",
       .min = 0},
      {.name = "parallel.backward_prefetch",
       .slot = SLOT(parallel.backward_prefetch),
       .help = "layers gathered ahead in backward; -1: 1, but 0 on a CPU",
       .min = -1},
      {.name = "parallel.merge_bytes",
       .slot = SLOT(parallel.merge_bytes),
       .help = "small layers share collectives of at most so many bytes, where that saves time; 0: none does; -1: as "
               "measured",
       .min = -1},
      {.name = "parallel.rows",
       .slot = SLOT(parallel.rows),
       .help = "rows of a matrix that stay together on one rank; 0: any cut will do",
       .min = 0},
      {.name = "parallel.collectives",
       .slot = SLOT(parallel.collectives),
       .help = "auto: the fastest measured; stock: those that FSDP2 issues",
       .choices = kCollectives},
      {.name = "parallel.gradients_in_place",
       .slot = SLOT(parallel.gradients_in_place),
       .help = "gradients of matrices computed where they are reduced; same_bits: where nothing changes by it; always: "
               "where it can be; no: copied there",
       .choices = kGradientsInPlace},
      {.name = "parallel.timeout_s",
       .slot = SLOT(parallel.timeout_s),
       .help = "seconds that a rank waits for the others",
       .min = 0,
       .max = 86400,
       .min_excluded = true},

      {.name = "eval.every",
       .slot = SLOT(eval.every),
       .help = "steps between validations; 0: only before the first and after the last",
       .min = 0},
      {.name = "eval.sequences",
       .slot = SLOT(eval.sequences),
       .help = "held-out sequences in one validation",
       .min = 1},
      {.name = "eval.sample_bytes",
       .slot = SLOT(eval.sample_bytes),
       .help = "bytes of text generated at the end",
       .min = 0},
      {.name = "eval.temperature",
       .slot = SLOT(eval.temperature),
       .help = "of that text; 0: always the likeliest byte",
       .min = 0},

      {.name = "checkpoint.every",
       .slot = SLOT(checkpoint.every),
       .help = "steps between checkpoints, of which one comes at the end and at SIGTERM or SIGINT too; 0: none",
       .min = 0},
      {.name = "checkpoint.keep",
       .slot = SLOT(checkpoint.keep),
       .help = "newest checkpoints that stay; 0: all",
       .min = 0},
      {.name = "checkpoint.resume",
       .slot = SLOT(checkpoint.resume),
       .help = "a checkpoint to go on from, or auto: the newest of this run, if there is one"},
      {.name = "checkpoint.async",
       .slot = SLOT(checkpoint.async),
       .help = "train on while a copy is written; takes the memory of the copy"},
      {.name = "checkpoint.timeout_s",
       .slot = SLOT(checkpoint.timeout_s),
       .help = "seconds that writing a checkpoint may take",
       .min = 0,
       .max = 604800,
       .min_excluded = true},

      {.name = "run.dir",
       .slot = SLOT(run.dir),
       .help = "folder of metrics, summary and resolved config; empty: runs/<config name>"},
      {.name = "run.device",
       .slot = SLOT(run.device),
       .help = "auto: CUDA where there is a device for every rank",
       .choices = kDevices},
  };
}

#undef SLOT
#define SLOT(member) [](optim::ParamRule& rule) -> ConfigSlot { return &rule.member; }

std::vector<RuleKey> make_rule_keys() {
  return {
      {.name = "match", .slot = SLOT(match), .help = "regular expression, searched for in full names of parameters"},
      {.name = "kind",
       .slot = SLOT(kind),
       .help = "the optimizer that takes them",
       .choices = optim::optimizer_kinds()},
      {.name = "lr_scale", .slot = SLOT(lr_scale), .help = "factor on the learning rate", .min = 0},
      {.name = "weight_decay", .slot = SLOT(weight_decay), .help = "in the place of optimizer.weight_decay", .min = 0},
      {.name = "state_format", .slot = SLOT(state_format), .help = "of the optimizer's states; depends on the kind"},
      {.name = "splits",
       .slot = SLOT(splits),
       .help = "rows of each of the matrices that a fused weight is made of; muon and soap only",
       .min = 1},
      {.name = "max_dims", .slot = SLOT(max_dims), .help = "only parameters of at most so many dims", .min = 1},
  };
}

#undef SLOT

std::string_view section_of(std::string_view name) {
  return name.substr(0, name.find('.'));
}

std::string_view last_part(std::string_view name) {
  return name.substr(name.find('.') + 1);
}

template <class Owner>
struct Describe {
  const KeyOf<Owner>& key;
  std::string range() const {
    std::string text;
    if (key.min != -kNone) text += fmt::format(" {} {}", key.min_excluded ? ">" : ">=", key.min);
    if (key.max != kNone) {
      text += fmt::format("{} {} {}", text.empty() ? "" : " and", key.max_excluded ? "<" : "<=", key.max);
    }
    return text;
  }
  std::string operator()(const bool*) const { return "true or false"; }
  std::string operator()(const Index*) const { return "an integer" + range(); }
  std::string operator()(const double*) const { return "a number" + range(); }
  std::string operator()(const std::string*) const {
    return key.choices.empty() ? "a string" : fmt::format("one of {}", fmt::join(key.choices, ", "));
  }
  std::string operator()(const std::vector<Index>*) const { return "a list of integers" + range(); }
  std::string operator()(const std::vector<double>*) const {
    return key.length == 0 ? "a list of numbers" + range() : fmt::format("a list of {} numbers{}", key.length, range());
  }
  std::string operator()(const std::vector<std::string>*) const { return "a list of strings"; }
  template <class Value>
  std::string operator()(const std::optional<Value>*) const {
    return (*this)(static_cast<const Value*>(nullptr));
  }
};

template <class Owner>
std::string describe_value(const KeyOf<Owner>& key) {
  Owner scratch;
  return std::visit(Describe<Owner>{key}, key.slot(scratch));
}

}  // namespace

std::span<const ConfigKey> config_keys() {
  static const std::vector<ConfigKey> keys = make_keys();
  return keys;
}

std::span<const RuleKey> rule_keys() {
  static const std::vector<RuleKey> keys = make_rule_keys();
  return keys;
}

std::string suggest_rule_key(std::string_view name) {
  std::string_view best;
  std::size_t best_distance = std::max<std::size_t>(2, name.size() / 3) + 1;
  for (const RuleKey& key : rule_keys()) {
    const std::size_t distance = edit_distance(name, key.name);
    if (distance >= best_distance) continue;
    best = key.name;
    best_distance = distance;
  }
  return best.empty() ? std::string() : fmt::format(" Did you mean '{}'?", best);
}

const ConfigKey* find_config_key(std::string_view name) {
  const auto keys = config_keys();
  const auto it = std::ranges::find(keys, name, &ConfigKey::name);
  return it == keys.end() ? nullptr : &*it;
}

std::string suggest_config_key(std::string_view name) {
  std::string_view best;
  std::size_t best_distance = std::max<std::size_t>(2, name.size() / 3) + 1;
  const auto offer = [&](std::string_view candidate, std::size_t distance) {
    if (distance >= best_distance) return;
    best = candidate;
    best_distance = distance;
  };
  const bool is_section = name.find('.') == std::string_view::npos;
  for (const ConfigKey& key : config_keys()) {
    // A section of its own, or a key that was written in no section or in the wrong one.
    if (is_section) offer(section_of(key.name), edit_distance(name, section_of(key.name)));
    offer(key.name, edit_distance(name, key.name));
    offer(key.name, edit_distance(last_part(name), last_part(key.name)) + 1);
  }
  return best.empty() ? std::string() : fmt::format(" Did you mean '{}'?", best);
}

std::string expected_value(const ConfigKey& key) {
  return describe_value(key);
}

std::string expected_value(const RuleKey& key) {
  return describe_value(key);
}

}  // namespace ragged::train
