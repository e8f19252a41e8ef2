// `ragged export`: a checkpoint as a folder that Hugging Face transformers loads.
#pragma once

#include <string>

namespace ragged::cli {

struct ExportArguments {
  std::string checkpoint;  // of a step, or of steps: then the newest
  std::string out;
  std::string to = "safetensors";
  std::string dtype = "keep";
  std::string max_file_size = "5GB";
  std::string tokenizer;  // a folder; empty: of bytes
};

/// Throws CheckpointError for a checkpoint that is none or damaged, and an `out` that exists.
void run_export(const ExportArguments& arguments);

}  // namespace ragged::cli
