// The files beside a Hugging Face model's weights, as texts: config.json from our [model] keys and back, the generation
// settings, and a tokenizer for bytes. No files are touched.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ragged/base/math.h"
#include "ragged/train/config.h"

namespace ragged::train {

/// config.json for a valid config. `dtype` is safetensors' name of the weights' ("F32"); `sequence` the longest that it
/// was trained on, which our models don't limit.
std::string hf_config_json(const ModelConfig& config, std::string_view dtype, Index sequence);

/// Sampling without tokens of special meaning.
std::string hf_generation_config_json();

/// The config of a model with these weights; `from` isn't set, and what config.json doesn't say (balance_loss) keeps
/// its default. Throws InvalidArgument that names `source`, the key, what was expected and what came: for architectures
/// that our models aren't, parts of theirs that ours don't have (biases of attention, sinks, other rotary positions,
/// sliding windows, quantised weights), and sizes out of range.
ModelConfig model_config_from_hf(std::string_view json, std::string_view source);

/// Keys of [model] in which two configs describe other tensors or other mathematics, as "dim: 256 -> 512"; where they
/// start from, how they are initialised and balanced doesn't count.
std::vector<std::string> model_differences(const ModelConfig& before, const ModelConfig& now);

/// tokenizer.json: a byte-level BPE without merges, whose 256 ids are the bytes of the text, as `ragged train` reads
/// it.
std::string byte_tokenizer_json();
/// tokenizer_config.json beside it.
std::string byte_tokenizer_config_json();

}  // namespace ragged::train
