#include "ragged/train/trainer.h"

#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "ragged/fsdp/unit.h"
#include "ragged/optim/clip_grad.h"
#include "ragged/optim/make_optimizer.h"
#include "ragged/train/checkpointing.h"
#include "ragged/train/device.h"
#include "ragged/train/evaluate.h"
#include "ragged/train/language_model.h"
#include "ragged/train/optimizer_setup.h"
#include "ragged/train/persistent_bytes.h"
#include "ragged/train/precision.h"
#include "ragged/train/schedule.h"
#include "ragged/train/step_meter.h"
#include "ragged/train/stop_signal.h"

namespace ragged::train {
namespace {

constexpr const char* kPrompt = "def ";

layout::Mesh make_mesh(const ParallelConfig& config, int world_size) {
  const Index shard = config.shard == 0 ? world_size / config.replicate : config.shard;
  RAGGED_CHECK(
      shard * config.replicate == world_size,
      "[train] Expected parallel.shard * parallel.replicate = {} ranks, but got {} * {}. "
      "parallel.shard=0 takes what replicate leaves.",
      world_size, shard, config.replicate);
  if (config.replicate == 1) return layout::Mesh::shard(world_size);
  return layout::Mesh::hybrid(static_cast<int>(config.replicate), static_cast<int>(shard));
}

// Ranks that trained on different text would still agree on everything else.
void check_same_text(const comm::World& world, std::uint64_t fingerprint) {
  const auto value = static_cast<std::int64_t>(fingerprint >> 2);  // its negative must fit
  const at::Tensor extremes = at::tensor({value, -value}, at::kLong).to(world.device());
  world.all().all_reduce_max(extremes, "text fingerprint").wait();
  RAGGED_CHECK(
      extremes[0].item<std::int64_t>() == -extremes[1].item<std::int64_t>(),
      "[train] Expected the same text on all ranks, but data.path holds different bytes on some of "
      "them (rank {} of {}).",
      world.rank(), world.size());
}

std::string name_of(const torch::nn::Module& child, const torch::nn::Module& root) {
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    if (item.value().get() == &child) return item.key();
  }
  throw InternalError("[train] A layer isn't a module of its model.");
}

// A unit a layer; embedding, last norm and head are the root's own.
std::shared_ptr<fsdp::Unit> shard_model(
    LanguageModel& model, const comm::MeshGroups& groups, const Config& config, at::ScalarType param_dtype) {
  const ParamChoices choices = resolve_optimizers(config, model);
  fsdp::FullyShardOptions options;
  options.groups = groups;
  options.mixed_precision.param_dtype = param_dtype;
  options.mixed_precision.reduce_dtype = parse_scalar_type(config.train.reduce_dtype);
  options.shard_policy = shard_policy(config, choices, "");

  fsdp::FullyShardOptions layer_options = options;
  layer_options.reshard_after_forward = config.parallel.reshard_after_forward;
  layer_options.activation_checkpointing = config.train.activation_checkpointing;
  std::vector<std::shared_ptr<fsdp::Unit>> layers;
  for (ShardableModule* layer : model.layer_modules()) {
    layer_options.shard_policy = shard_policy(config, choices, name_of(*layer, model) + ".");
    layers.push_back(fsdp::fully_shard(*layer, layer_options));
  }
  auto root = fsdp::fully_shard(model, options);

  fsdp::RuntimeOptions runtime;
  runtime.forward_prefetch = static_cast<int>(config.parallel.forward_prefetch);
  runtime.backward_prefetch = static_cast<int>(config.parallel.backward_prefetch);
  root->set_runtime_options(runtime);
  return root;
}

// Alike on all ranks, since loss and norm are: nobody is left waiting.
[[noreturn]] void fail_on_nonfinite(double loss, double grad_norm, Index step, double lr) {
  throw Error(fmt::format(
      "[train] Expected a finite loss and gradient norm, but got {} and {} at step {} with learning "
      "rate {:.2e}. Look at the last lines of metrics.jsonl: a norm that grew points to train.lr "
      "(lower it, or lengthen train.warmup); a sudden one to train.param_dtype (try fp32). "
      "train.nonfinite=skip leaves such steps out.",
      loss, grad_norm, step, lr));
}

// Clips and steps, without a pass for the clipping; counts a step that changes nothing since its gradients can't be
// trusted.
void update(fsdp::Unit& root, optim::Optimizer& optimizer, const TrainConfig& config, StepMetrics& metrics) {
  const optim::GradClip clip = optim::grad_clip(root, config.clip);
  metrics.grad_norm = clip.norm;
  const bool is_finite = std::isfinite(metrics.loss) && std::isfinite(clip.norm);
  if (!is_finite) {
    if (config.nonfinite == "raise") fail_on_nonfinite(metrics.loss, clip.norm, metrics.step, metrics.lr);
    ++metrics.skipped;
  }
  optimizer.set_lr(metrics.lr);
  optimizer.step({.grad = clip.factor, .skip = !is_finite});
}

std::string headline(
    const Config& config, const comm::World& world, const TextData& data, const LanguageModel& model,
    const ComputeDtype& compute) {
  const TrainConfig& train = config.train;
  return fmt::format(
      "{} parameters on {} rank{} ({}), computing in {} ({})\n"
      "{} of text from {} in {} files, {} held out; {} tokens a step, {} in all\n",
      parameter_count(model), world.size(), world.size() == 1 ? "" : "s", world.device().str(),
      compute.dtype == at::kBFloat16 ? "bf16" : "fp32", compute.reason,
      format_bytes(data.train.numel() + data.validation.numel()), data.folder, data.files,
      format_bytes(data.validation.numel()), world.size() * train.batch * train.accumulate * train.sequence,
      world.size() * train.batch * train.accumulate * train.sequence * train.steps);
}

}  // namespace

RunSummary train(const Config& config, const comm::RankEnv& env, const StopRequest& stop) {
  // Before anybody connects, so that a wrong path stops every rank at once.
  check_optimizer_rules(config);
  const TextData data = load_text(config.data, config.train.sequence);

  comm::WorldOptions options;
  options.device = choose_device(config.run.device, env);
  options.timeout = std::chrono::milliseconds(std::llround(1000.0 * config.parallel.timeout_s));
  options.comm.collectives =
      config.parallel.collectives == "stock" ? comm::Collectives::kStock : comm::Collectives::kAuto;
  comm::World world = comm::World::connect(env, options);
  return train(config, world, data, stop);
}

RunSummary train(const Config& config, comm::World& world, const TextData& data, const StopRequest& stop) {
  const Index steps = config.train.steps;
  const Index batch = config.train.batch;
  const Index accumulate = config.train.accumulate;
  const Index sequence = config.train.sequence;
  const auto seed = static_cast<std::uint64_t>(config.train.seed);

  // Who computes what with whom.
  check_optimizer_rules(config);
  check_same_text(world, data.fingerprint);
  const comm::MeshGroups groups = world.groups(make_mesh(config.parallel, world.size()));
  const ComputeDtype compute = choose_param_dtype(config.train.param_dtype, world.device().type(), read_cpuinfo());

  // The model takes no memory until each rank fills its shard.
  const std::shared_ptr<LanguageModel> model = make_model(config.model, deferred_parameters(world.device()));
  const auto root = shard_model(*model, groups, config, compute.dtype);
  root->init_parameters(seed, model->init_rule());
  const std::unique_ptr<optim::Optimizer> optimizer = optim::make_optimizer(root, optimizer_spec(config));
  const std::vector<optim::OptimizerRow> table = optimizer->table();

  // Before anything is written, so that a checkpoint that doesn't fit leaves the run as it was.
  RunCheckpoints checkpoints(config, world, root, *optimizer, data.fingerprint);
  const std::optional<Resumed> resumed = checkpoints.resume();
  RunProgress progress = resumed ? resumed->progress : RunProgress{};

  Reporter report(world.rank() == 0, config.run.dir, progress.step);
  report.say(to_toml(config));
  report.say(headline(config, world, data, *model, compute));
  report.say(default_rules_text(config.optimizer.kind) + optimizer_table(table));
  if (world.rank() == 0) write_file(report.dir() / "config.toml", to_toml(config));

  const auto validate_now = [&] {
    return validation_loss(
        world, *root, *model, data.validation,
        {.sequences = config.eval.sequences, .sequence = sequence, .batch = batch});
  };
  if (resumed) {
    for (const std::string& note : resumed->notes) report.say(note);
  } else {
    if (!config.checkpoint.resume.empty()) report.say("no checkpoint to resume from yet: from the beginning");
    progress.initial_val_loss = validate_now();
    report.say(fmt::format("validation loss before training: {:.4f}", progress.initial_val_loss));
  }
  RunSummary summary{
      .steps = progress.step,
      .parameters = parameter_count(*model),
      .world_size = world.size(),
      .param_dtype = compute.dtype == at::kBFloat16 ? "bf16" : "fp32",
      .optimizer = config.optimizer.kind,
      .initial_val_loss = progress.initial_val_loss};
  if (progress.step >= steps) {
    report.say(fmt::format("nothing left to do: train.steps is {}", steps));
    return summary;
  }

  const ScheduleOptions schedule{
      .peak = config.train.lr, .min_ratio = config.train.min_lr_ratio, .warmup = config.train.warmup, .steps = steps};
  const Index tokens_per_step = world.size() * batch * accumulate * sequence;
  StepMetrics metrics;
  StepBytes measured;

  for (Index step = progress.step; step < steps; ++step) {
    const StepMeter meter(*root);

    // Forward and backward, a micro-batch after the other. Gradients add up; they are reduced in the last one.
    at::Tensor loss_sum = at::zeros({1}, at::TensorOptions().dtype(at::kDouble).device(world.device()));
    for (Index micro = 0; micro < accumulate; ++micro) {
      root->set_requires_gradient_sync(config.train.sync_each_micro_batch || micro == accumulate - 1);
      const Index first = (world.rank() * accumulate + micro) * batch;
      const Batch part = training_batch(data.train, sequence, seed, {.step = step, .first = first, .count = batch});
      const at::Tensor loss = root->call(*model, part.tokens.to(world.device()), part.targets.to(world.device()));
      (loss / accumulate).backward();
      loss_sum += loss.detach();
    }
    // What ranks must agree on besides goes along.
    const int signal = stop ? stop() : 0;
    const StepFlags flags = checkpoints.flags(signal != 0);
    const at::Tensor sums = at::cat({loss_sum, at::tensor({flags.stop, flags.written}, loss_sum.options())});
    world.all().all_reduce_sum(sums, "loss").wait();
    const at::Tensor totals = sums.cpu();

    // Update.
    metrics.step = step + 1;
    metrics.loss = totals[0].item<double>() / static_cast<double>(world.size() * accumulate);
    metrics.lr = learning_rate(schedule, step);
    update(*root, *optimizer, config.train, metrics);
    if (metrics.step == steps) measured.persistent_bytes = measured_persistent_bytes(*root, *optimizer);
    root->zero_grad();

    // Report. The clock stops before validation.
    const double step_seconds = meter.seconds();
    progress.step = metrics.step;
    progress.seconds += step_seconds;
    const PersistentBytes held = measured.persistent_bytes;
    measured = meter.bytes();
    measured.persistent_bytes = held;
    metrics.step_ms = 1000.0 * step_seconds;
    metrics.tokens_per_s = static_cast<double>(tokens_per_step) / step_seconds;
    metrics.comm_wait = meter.wait_seconds() / step_seconds;
    metrics.peak_bytes = peak_memory_bytes(world.device());
    metrics.val_loss.reset();
    const bool is_last = metrics.step == steps;
    const bool is_due = config.eval.every > 0 && metrics.step % config.eval.every == 0;
    if (step == 0 || is_due || is_last) metrics.val_loss = validate_now();
    report.step(metrics, steps, metrics.val_loss || metrics.step % config.train.log_every == 0);

    // Save. Ranks know from the sums what all of them do.
    const StepFlags agreed{.stop = totals[1].item<double>(), .written = totals[2].item<double>()};
    for (const std::string& line : checkpoints.after_step(progress, agreed)) report.say(line);
    if (agreed.stop > 0.0 && !is_last) {
      const std::string name = signal != 0 ? signal_name(signal) : "a signal on another rank";
      report.say(fmt::format(
          "stopped by {} after step {} of {}; --checkpoint.resume=auto goes on from here", name, metrics.step, steps));
      summary.steps = progress.step;
      return summary;
    }
  }

  // What the plan says of such a step, before sampling changes when parameters are dropped.
  StepBytes planned = to_step_bytes(root->forecast(static_cast<int>(accumulate), config.train.sync_each_micro_batch));
  planned.persistent_bytes = planned_persistent_bytes(*root, table);
  measured.padding_bytes = measure_padding(*root, compute.dtype);

  if (config.eval.sample_bytes > 0) {
    root->set_reshard_after_forward(false);
    const std::string text = generate(
        *root, *model, world.device(), kPrompt,
        {.bytes = config.eval.sample_bytes, .context = sequence, .temperature = config.eval.temperature, .seed = seed});
    report.say(fmt::format("\nthe model writes:\n\n{}\n", printable(text)));
  }

  summary.steps = steps;
  summary.skipped_steps = metrics.skipped;
  summary.seconds = progress.seconds;
  summary.loss = metrics.loss;
  summary.val_loss = *metrics.val_loss;
  summary.planned = planned;
  summary.measured = measured;
  report.finish(summary);
  return summary;
}

}  // namespace ragged::train
