// `ragged train`: from what the command line says to a finished run.
#pragma once

#include <string>
#include <vector>

namespace ragged::cli {

/// What stands behind `ragged train`.
struct TrainArguments {
  std::string config;
  std::vector<std::string> overrides;  // "--section.key=value"
};

/// Trains on this rank. Throws what the library throws.
void run_train(const TrainArguments& arguments);

/// Every configuration key, for --help.
std::string train_help();

}  // namespace ragged::cli
