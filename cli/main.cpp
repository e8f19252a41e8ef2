// The command `ragged`: parses arguments, hands them to one sub-command, turns exceptions into one line and an exit
// code. 0: done; 2: the call, a config or the environment is wrong; 1: anything else that failed.
#include <cstdio>
#include <exception>
#include <string>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "ragged/base/error.h"
#include "train_command.h"

namespace {

constexpr int kFailure = 1;
constexpr int kUsage = 2;

// One line each, however the message was written; ranks write at once, so in one call.
int fail(const std::string& message, int code) {
  std::string line = message.substr(0, message.find_last_not_of(" \n") + 1);
  for (char& c : line) c = c == '\n' ? ' ' : c;
  const std::string text = fmt::format("ragged: error: {}\n", line);
  std::fwrite(text.data(), 1, text.size(), stderr);
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Fully sharded training whose shard borders respect blocks.", "ragged");
  app.set_version_flag("--version", "ragged " RAGGED_VERSION);
  app.require_subcommand(1);

  ragged::cli::TrainArguments arguments;
  CLI::App* train = app.add_subcommand(
      "train", "Train a model on text: on this process alone, or on every rank that torchrun starts.");
  train->add_option("CONFIG", arguments.config, "TOML file, such as configs/demo.toml")->required();
  train->allow_extras();
  train->footer(ragged::cli::train_help);
  train->callback([&] {
    arguments.overrides = train->remaining();
    ragged::cli::run_train(arguments);
  });

  try {
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::Success& request) {  // --help, --version
    return app.exit(request);
  } catch (const CLI::ParseError& error) {
    return fail(std::string(error.what()) + ". `ragged --help` shows how to call it.", kUsage);
  } catch (const ragged::InvalidArgument& error) {
    return fail(error.what(), kUsage);
  } catch (const std::exception& error) {
    return fail(error.what(), kFailure);
  }
}
