#include "train_command.h"

#include "ragged/comm/rank_env.h"
#include "ragged/train/config.h"
#include "ragged/train/trainer.h"

namespace ragged::cli {

void run_train(const TrainArguments& arguments) {
  const train::Config config = train::load_config(arguments.config, arguments.overrides);
  train::train(config, comm::rank_env());
}

std::string train_help() {
  return "Keys of CONFIG.toml and of --section.key=value, with their defaults:\n" + train::describe_config_keys();
}

}  // namespace ragged::cli
