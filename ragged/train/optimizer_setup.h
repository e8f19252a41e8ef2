// From what a config says of optimizers to what optim and fsdp take: settings, rules checked against the model's
// parameters, the blocks that states need, and the table that is printed before training.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "ragged/fsdp/options.h"
#include "ragged/optim/make_optimizer.h"
#include "ragged/train/config.h"
#include "ragged/train/language_model.h"

namespace ragged::train {

optim::OptimizerSpec optimizer_spec(const Config& config);

/// By full name.
using ParamChoices = std::map<std::string, optim::ParamChoice, std::less<>>;

/// What the rules come to for this model; it may be on the meta device. Throws what optim::resolve throws.
ParamChoices resolve_optimizers(const Config& config, const torch::nn::Module& model);
/// The same before anything is allocated or connected: a wrong rule stops every rank at once.
void check_optimizer_rules(const Config& config);

/// Blocks for one fully_shard call over the module that is called `prefix` ("" for the root, else "layers.3."):
/// parallel.rows where it is set; else what a parameter's states need, if anything.
fsdp::ShardPolicy shard_policy(const Config& config, const ParamChoices& choices, const std::string& prefix);

/// The default rules of a kind, for people; empty where it has none.
std::string default_rules_text(std::string_view kind);

/// A line for parameters that differ in nothing but the number of their layer: "layers.*.self_attn.q_proj.weight". The
/// bytes are those of states on this rank.
std::string optimizer_table(std::span<const optim::OptimizerRow> rows);

}  // namespace ragged::train
