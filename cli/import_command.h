// `ragged import`: checks a Hugging Face model and writes a config that training starts from it with.
#pragma once

#include <string>

namespace ragged::cli {

struct ImportArguments {
  std::string folder;
  std::string config;  // file that is written; empty: printed
};

/// Throws InvalidArgument for a model that ours can't be and a config file that exists, CheckpointError for missing and
/// damaged files.
void run_import(const ImportArguments& arguments);

}  // namespace ragged::cli
