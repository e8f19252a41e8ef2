#include "ragged/train/checkpointing.h"

#include <chrono>
#include <cmath>
#include <map>
#include <mutex>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ragged/train/metrics.h"

namespace ragged::train {
namespace {

constexpr const char* kConfig = "config";
constexpr const char* kGenerator = "generator.cpu";
constexpr const char* kStepsOf = "optimizer.steps.";  // and the parameter's name

// Training draws its batches from (seed, step, number) and needs no generator; a model with dropout does.
std::string generator_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  const at::Tensor state = generator.get_state();
  std::string text;
  for (Index i = 0; i < state.numel(); ++i) text += fmt::format("{:02x}", state.const_data_ptr<std::uint8_t>()[i]);
  return text;
}

void set_generator_state(const std::string& text) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  const at::Tensor state = generator.get_state();
  if (static_cast<Index>(text.size()) != 2 * state.numel()) return;  // of another version of torch
  auto* bytes = state.mutable_data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < text.size() / 2; ++i) {
    bytes[i] = static_cast<std::uint8_t>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  }
  generator.set_state(state);
}

// "train.lr" -> "0.003", for the texts that to_toml() writes.
std::map<std::string, std::string> values_of(std::string_view toml) {
  std::map<std::string, std::string> values;
  std::string section;
  while (!toml.empty()) {
    const std::string_view line = toml.substr(0, toml.find('\n'));
    toml.remove_prefix(std::min(toml.size(), line.size() + 1));
    const std::size_t equals = line.find(" = ");
    if (line.starts_with('[') && line.ends_with(']')) {
      section = line.substr(1, line.size() - 2);
    } else if (equals != std::string_view::npos) {
      values[fmt::format("{}.{}", section, line.substr(0, equals))] = line.substr(equals + 3);
    }
  }
  return values;
}

std::string saved_line(const checkpoint::SaveReport& report) {
  return fmt::format(
      "saved {}: {} in {:.2f} s ({}/s), training waited {:.2f} s", report.folder.string(), format_bytes(report.bytes),
      report.seconds,
      format_bytes(static_cast<Index>(static_cast<double>(report.bytes) / std::max(report.seconds, 1e-3))),
      report.blocked_seconds);
}

}  // namespace

RunCheckpoints::RunCheckpoints(
    const Config& config, const comm::World& world, std::shared_ptr<fsdp::Unit> root, optim::Optimizer& optimizer,
    std::uint64_t text_fingerprint)
    : config_(config),
      world_(world),
      root_(std::move(root)),
      optimizer_(optimizer),
      text_fingerprint_(text_fingerprint),
      folder_(std::filesystem::path(config.run.dir) / "checkpoints") {
  if (config.checkpoint.every == 0) return;
  checkpoint::SaverOptions options;
  options.keep = config.checkpoint.keep;
  options.async = config.checkpoint.async;
  options.timeout = std::chrono::milliseconds(std::llround(1000.0 * config.checkpoint.timeout_s));
  saver_ = std::make_unique<checkpoint::Saver>(world.all(), folder_, options);
}

std::vector<checkpoint::Item> RunCheckpoints::items() const {
  std::map<std::string, std::string> formats;
  for (const optim::OptimizerRow& row : optimizer_.table()) formats[row.name] = row.state_format;
  std::vector<checkpoint::Item> items = checkpoint::model_items(root_->sharded_parameters());
  for (checkpoint::Item& item : checkpoint::optimizer_items(optimizer_.states(), formats)) {
    items.push_back(std::move(item));
  }
  return items;
}

checkpoint::State RunCheckpoints::state(const RunProgress& progress) const {
  checkpoint::State state;
  state.tensors = items();
  state.facts.texts[kConfig] = to_toml(config_);
  state.facts.texts["tokenizer"] = "bytes";
  state.facts.integers["step"] = progress.step;
  state.facts.integers["seed"] = config_.train.seed;
  state.facts.integers["skipped"] = progress.skipped;
  // Batches are a function of seed and step: that is the position in the data, and the text must be the same.
  state.facts.integers["text_fingerprint"] = static_cast<std::int64_t>(text_fingerprint_);
  state.facts.numbers["lr"] = optimizer_.lr();
  state.facts.numbers["initial_val_loss"] = progress.initial_val_loss;
  state.facts.numbers["seconds"] = progress.seconds;
  const std::vector<std::int64_t> steps = optimizer_.steps();
  const std::vector<buffer::ShardedTensor> parameters = root_->sharded_parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    state.facts.integers[kStepsOf + parameters[i].name] = steps.at(i);
  }
  for (const optim::OptimizerRow& row : optimizer_.table()) {
    state.facts.texts["optimizer.kind." + row.name] = row.optimizer;
  }
  state.rank_texts[kGenerator] = generator_state();
  return state;
}

std::optional<Resumed> RunCheckpoints::resume() {
  const std::string& wanted = config_.checkpoint.resume;
  if (wanted.empty()) return std::nullopt;
  Resumed resumed;
  const auto folder = checkpoint::find_checkpoint(world_.all(), wanted, folder_, &resumed.notes);
  if (!folder) return std::nullopt;

  std::map<std::string, std::string> kinds;
  for (const optim::OptimizerRow& row : optimizer_.table()) kinds[row.name] = row.optimizer;
  checkpoint::LoadOptions options;
  options.check = [&](const checkpoint::CheckpointIndex& index) {
    for (const auto& [name, kind] : kinds) {
      const auto saved = index.facts.texts.find("optimizer.kind." + name);
      if (saved == index.facts.texts.end() || saved->second == kind) continue;
      throw CheckpointError(fmt::format(
          "[load] Expected parameter '{}' to be stepped by {}, as when '{}' was saved, but got {}. Set optimizer.kind "
          "and its rules to the saved ones.",
          name, saved->second, folder->string(), kind));
    }
  };
  const checkpoint::LoadReport report = checkpoint::load(world_.all(), *folder, items(), options);

  const auto integer = [&](const std::string& name) {
    const auto found = report.facts.integers.find(name);
    return found == report.facts.integers.end() ? 0 : found->second;
  };
  const auto number = [&](const std::string& name) {
    const auto found = report.facts.numbers.find(name);
    return found == report.facts.numbers.end() ? 0.0 : found->second;
  };
  std::vector<std::int64_t> steps;
  for (const buffer::ShardedTensor& parameter : root_->sharded_parameters()) {
    steps.push_back(integer(kStepsOf + parameter.name));
  }
  optimizer_.set_steps(steps);
  root_->mark_parameters_changed();
  if (report.rank_texts.contains(kGenerator)) set_generator_state(report.rank_texts.at(kGenerator));
  resumed.progress = {
      .step = report.step,
      .initial_val_loss = number("initial_val_loss"),
      .seconds = number("seconds"),
      .skipped = integer("skipped")};

  resumed.notes.push_back(fmt::format(
      "resumed from {}: step {}, saved by {} rank{}; {} read in {:.2f} s", folder->string(), report.step,
      report.world_size, report.world_size == 1 ? "" : "s", format_bytes(report.read_bytes), report.seconds));
  if (integer("text_fingerprint") != static_cast<std::int64_t>(text_fingerprint_)) {
    resumed.notes.emplace_back("the text is another than when it was saved");
  }
  const auto config = report.facts.texts.find(kConfig);
  if (config != report.facts.texts.end()) {
    for (const std::string& line : config_changes(config->second, to_toml(config_))) {
      resumed.notes.push_back("changed since: " + line);
    }
  }
  return resumed;
}

StepFlags RunCheckpoints::flags(bool stop) const {
  return {.stop = stop ? 1.0 : 0.0, .written = !saver_ || saver_->is_written() ? 1.0 : 0.0};
}

std::vector<std::string> RunCheckpoints::after_step(const RunProgress& progress, const StepFlags& sums) {
  std::vector<std::string> lines;
  if (!saver_) return lines;
  if (saver_->is_busy() && sums.written == world_.size()) lines.push_back(saved_line(saver_->finish()));
  const bool is_end = sums.stop > 0.0 || progress.step == config_.train.steps;
  if (is_end || progress.step % config_.checkpoint.every == 0) {
    const auto before = saver_->start(progress.step, state(progress));
    if (before) lines.push_back(saved_line(*before));
    if (is_end || !config_.checkpoint.async) lines.push_back(saved_line(saver_->finish()));
  }
  return lines;
}

std::vector<std::string> config_changes(std::string_view before, std::string_view now) {
  const auto old_values = values_of(before);
  std::vector<std::string> changes;
  for (const auto& [key, value] : values_of(now)) {
    const auto old = old_values.find(key);
    const bool is_ours = key.starts_with("checkpoint.") || key.starts_with("run.");
    if (is_ours || (old != old_values.end() && old->second == value)) continue;
    changes.push_back(fmt::format("{}: {} -> {}", key, old == old_values.end() ? "(none)" : old->second, value));
  }
  return changes;
}

}  // namespace ragged::train
