#include "train_command.h"

#include <optional>

#include "ragged/comm/rank_env.h"
#include "ragged/train/config.h"
#include "ragged/train/stop_signal.h"
#include "ragged/train/trainer.h"

namespace ragged::cli {

void run_train(const TrainArguments& arguments) {
  const train::Config config = train::load_config(arguments.config, arguments.overrides);
  // Without checkpoints there is nothing to save: signals do what they always do.
  std::optional<train::StopSignal> signal;
  if (config.checkpoint.every > 0) signal.emplace();
  train::train(config, comm::rank_env(), [&] { return signal ? signal->number() : 0; });
}

std::string train_help() {
  return "Keys of CONFIG.toml and of --section.key=value, with their defaults:\n" + train::describe_config_keys();
}

}  // namespace ragged::cli
