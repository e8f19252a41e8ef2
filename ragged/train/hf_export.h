// A checkpoint of `ragged train` as a folder that Hugging Face transformers loads, and a config that starts from such a
// folder. One process, a part of a tensor at a time; whatever number of ranks saved the checkpoint, the bytes are the
// same. No torch.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "ragged/checkpoint/model_files.h"
#include "ragged/checkpoint/read.h"

namespace ragged::train {

class HfWeights;

struct HfExportOptions {
  std::string dtype = "keep";         // "fp32", "bf16", or as it is in the checkpoint
  std::filesystem::path tokenizer{};  // folder whose tokenizer files are copied; empty: a tokenizer for bytes
  checkpoint::ModelFilesOptions files{};
};

struct HfExportReport {
  std::string architecture{};
  std::vector<std::string> files{};  // of weights
  Index tensors = 0;
  Index bytes = 0;    // of tensors
  std::string dtype;  // "F32"
};

/// Writes weights, config.json, generation_config.json and the tokenizer into the folder `out`, which appears whole or
/// not at all. Optimizer states stay behind. Every byte that is read is checked. Throws CheckpointError where `out`
/// exists, for damage, and for a checkpoint that holds no model of `ragged train` or not all of it; InvalidArgument for
/// options that can't be.
HfExportReport export_to_hf(
    const checkpoint::Checkpoint& checkpoint, const std::filesystem::path& out, const HfExportOptions& options = {});

/// A config file that `ragged train` starts from the weights with: its [model] section. The path is made absolute.
std::string import_config(const HfWeights& weights);

}  // namespace ragged::train
