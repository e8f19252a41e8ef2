// The command `ragged`: parses arguments, hands them to one sub-command, turns exceptions into one line and an exit
// code. 0: done; 2: the call, a config or the environment is wrong; 1: anything else that failed.
#include <cstdio>
#include <exception>
#include <string>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "export_command.h"
#include "import_command.h"
#include "inspect_command.h"
#include "plan_command.h"
#include "ragged/base/error.h"
#include "simulate_command.h"
#include "train_command.h"
#include "tune_command.h"

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

// What the commands that plan have in common.
void add_model_options(CLI::App& command, ragged::cli::LayoutArguments& layout) {
  command
      .add_option(
          "MODEL", layout.model, "a bundled model, an inventory, a .safetensors file, its index, or their folder")
      ->required();
  command.add_option("--ranks", layout.ranks, "ranks that train together")->required();
  command.add_option("--rows", layout.rows, "rows of a matrix that stay on one rank")->capture_default_str();
  command.add_flag("--flat-rows", layout.flat_rows, "let blocks run over the rows of a stack of experts");
  command.add_option("--ragged-blocks", layout.ragged_blocks, "most blocks a bucket that may travel without padding");
  command.add_flag("--json", layout.json, "for programs");
}

void add_layout_options(CLI::App& command, ragged::cli::LayoutArguments& layout) {
  command.add_option("--layers-per-bucket", layout.layers_per_bucket, "layers that are gathered together")
      ->capture_default_str();
  command.add_option("--svg", layout.svg, "draw into this file");
}

void add_step_options(CLI::App& command, ragged::cli::SimulateArguments& step) {
  command.add_option("--device", step.device, "a100, cpu, h100, h200, h800, or a JSON file")->capture_default_str();
  command.add_option("--tokens", step.tokens, "tokens a rank and step")->capture_default_str();
  command.add_option("--sequence", step.sequence, "tokens that attend to each other; 0: --tokens, at most 8192");
  command.add_option("--optimizer", step.optimizer, "adamw, adamw-bf16, adamw8bit, muon, soap or sgd")->capture_default_str();
  command.add_option("--checkpointing", step.checkpointing, "of activations: none or full")->capture_default_str();
  command.add_option("--reduce-dtype", step.reduce_dtype, "of gradients on the wire")->capture_default_str();
}

void add_plan(CLI::App& app, ragged::cli::PlanArguments& arguments) {
  CLI::App* plan = app.add_subcommand("plan", "Show how a model would be laid out: shards, padding, bytes per rank.");
  add_model_options(*plan, arguments.layout);
  add_layout_options(*plan, arguments.layout);
  plan->add_option("--strategy", arguments.strategy, "auto, single (one segment a bucket), or paper (its own search)")
      ->capture_default_str();
  plan->add_flag("--compare", arguments.compare, "beside FSDP1, FSDP2, DeepSpeed ZeRO-3 and Megatron-FSDP");
  plan->callback([&] { ragged::cli::run_plan(arguments); });
}

void add_simulate(CLI::App& app, ragged::cli::SimulateArguments& arguments) {
  CLI::App* simulate = app.add_subcommand("simulate", "Estimate memory and time of one training step.");
  add_model_options(*simulate, arguments.layout);
  add_layout_options(*simulate, arguments.layout);
  add_step_options(*simulate, arguments);
  simulate->add_option("--shard", arguments.shard, "ranks that share one copy of the model; 0: all");
  simulate->add_flag("--keep-gathered", arguments.keep_gathered, "don't reshard after forward (ZeRO-2)");
  simulate->add_option("--prefetch", arguments.prefetch, "units gathered ahead")->capture_default_str();
  simulate->add_option("--trace", arguments.trace, "write a Chrome trace into this file");
  simulate->callback([&] { ragged::cli::run_simulate(arguments); });
}

void add_tune(CLI::App& app, ragged::cli::TuneArguments& arguments) {
  CLI::App* tune = app.add_subcommand("tune", "Search group size, buckets and policies for time against memory.");
  add_model_options(*tune, arguments.step.layout);
  add_step_options(*tune, arguments.step);
  tune->add_option("--memory", arguments.memory, "a rank may take, such as 80GiB; default: 90 % of the device");
  tune->add_flag("--fixed-optimizer", arguments.fixed_optimizer, "don't offer optimizers with smaller states");
  tune->callback([&] { ragged::cli::run_tune(arguments); });
}

void add_inspect(CLI::App& app, ragged::cli::InspectArguments& arguments) {
  CLI::App* inspect = app.add_subcommand("inspect", "Show what is in a checkpoint, and check it.");
  inspect->add_option("DIR", arguments.folder, "a checkpoint, or a folder of them: then the newest")->required();
  inspect->add_flag("--verify", arguments.verify, "read everything and compare it with its checksums");
  inspect->add_flag("--facts", arguments.facts, "print the run's config and other texts in full");
  inspect->callback([&] { ragged::cli::run_inspect(arguments); });
}

void add_export(CLI::App& app, ragged::cli::ExportArguments& arguments) {
  CLI::App* command = app.add_subcommand("export", "Write a checkpoint's model as a folder that transformers loads.");
  command->add_option("DIR", arguments.checkpoint, "a checkpoint, or a folder of them: then the newest")->required();
  command->add_option("OUT", arguments.out, "the folder to make; nothing is overwritten")->required();
  command->add_option("--to", arguments.to, "the format: safetensors")->capture_default_str();
  command->add_option("--dtype", arguments.dtype, "of the weights: keep, fp32 or bf16")->capture_default_str();
  command->add_option("--max-file-size", arguments.max_file_size, "of one file of weights")->capture_default_str();
  command->add_option("--tokenizer", arguments.tokenizer, "folder to copy a tokenizer from; default: one for bytes");
  command->callback([&] { ragged::cli::run_export(arguments); });
}

void add_import(CLI::App& app, ragged::cli::ImportArguments& arguments) {
  CLI::App* command = app.add_subcommand(
      "import", "Check a Hugging Face model, and write a config that `ragged train` starts from it with.");
  command->add_option("MODEL", arguments.folder, "its folder, with config.json and .safetensors files")->required();
  command->add_option("CONFIG", arguments.config, "the TOML file to write; default: print it");
  command->callback([&] { ragged::cli::run_import(arguments); });
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

  ragged::cli::PlanArguments plan;
  add_plan(app, plan);
  ragged::cli::SimulateArguments simulate;
  add_simulate(app, simulate);
  ragged::cli::TuneArguments tune;
  add_tune(app, tune);
  ragged::cli::InspectArguments inspect;
  add_inspect(app, inspect);
  ragged::cli::ExportArguments export_arguments;
  add_export(app, export_arguments);
  ragged::cli::ImportArguments import_arguments;
  add_import(app, import_arguments);

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
