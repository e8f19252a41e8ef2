#include "ragged/train/trainer.h"

#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "ragged/comm/same_value.h"
#include "ragged/fsdp/unit.h"
#include "ragged/optim/clip_grad.h"
#include "ragged/optim/make_optimizer.h"
#include "ragged/train/checkpointing.h"
#include "ragged/train/device.h"
#include "ragged/train/evaluate.h"
#include "ragged/train/hf_load.h"
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
  RAGGED_CHECK(
      comm::is_same_on_all(world.all(), fingerprint, "text fingerprint"),
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

fsdp::GradientsInPlace parse_in_place(const std::string& text) {
  if (text == "always") return fsdp::GradientsInPlace::kAlways;
  return text == "no" ? fsdp::GradientsInPlace::kNo : fsdp::GradientsInPlace::kSameBits;
}

// A unit a layer; embedding, last norm and head are the root's own.
std::shared_ptr<fsdp::Unit> shard_model(
    LanguageModel& model, const ParamChoices& choices, const comm::MeshGroups& groups, const Config& config,
    at::ScalarType param_dtype) {
  fsdp::FullyShardOptions options;
  options.groups = groups;
  options.mixed_precision.param_dtype = param_dtype;
  options.mixed_precision.reduce_dtype = parse_scalar_type(config.train.reduce_dtype);
  options.shard_policy = shard_policy(config, choices, "");
  options.gradients_in_place = parse_in_place(config.parallel.gradients_in_place);

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
  if (config.parallel.backward_prefetch >= 0) {
    runtime.backward_prefetch = static_cast<int>(config.parallel.backward_prefetch);
  }
  if (config.parallel.merge_bytes >= 0) runtime.merge_bytes = config.parallel.merge_bytes;
  root->set_runtime_options(runtime);
  return root;
}

[[noreturn]] void fail_on_nonfinite(const StepMetrics& metrics) {
  throw Error(fmt::format(
      "[train] Expected a finite loss and gradient norm, but got {} and {} at step {} with learning "
      "rate {:.2e}. Look at the last lines of metrics.jsonl: a norm that grew points to train.lr "
      "(lower it, or lengthen train.warmup); a sudden one to train.param_dtype (try fp32). "
      "train.nonfinite=skip leaves such steps out.",
      metrics.loss, metrics.grad_norm, metrics.step, metrics.lr));
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

// One run on this rank, from the model's shards to the summary.
class Training {
 public:
  Training(const Config& config, comm::World& world, const TextData& data, const StopRequest& stop);
  RunSummary run();

 private:
  std::string load_start();
  void introduce(const std::optional<Resumed>& resumed);
  double validate();
  /// False where a signal asks for a stop.
  bool step(Index step);
  at::Tensor forward_backward(Index step);
  void update();
  void report(const StepMeter& meter);
  bool save(const StepFlags& agreed, int signal);
  RunSummary summary() const;
  RunSummary finish();

  const Config& config_;
  comm::World& world_;
  const TextData& data_;
  const StopRequest& stop_;
  const Index steps_;
  const ComputeDtype compute_;
  const ScheduleOptions schedule_;
  std::shared_ptr<LanguageModel> model_;
  std::shared_ptr<fsdp::Unit> root_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::optional<RunCheckpoints> checkpoints_;
  std::optional<Reporter> report_;
  RunProgress progress_;
  std::string start_from_;  // a line on whose weights these are
  StepMetrics metrics_;     // of the last step, as are the next two
  StepBytes measured_;
  PersistentBytes held_;
};

Training::Training(const Config& config, comm::World& world, const TextData& data, const StopRequest& stop)
    : config_(config),
      world_(world),
      data_(data),
      stop_(stop),
      steps_(config.train.steps),
      compute_(choose_param_dtype(config.train.param_dtype, world.device().type(), read_cpuinfo())),
      schedule_{
          .peak = config.train.lr,
          .min_ratio = config.train.min_lr_ratio,
          .warmup = config.train.warmup,
          .steps = config.train.steps} {
  // The model takes no memory until each rank fills its shard. Rules that don't fit it are found before any
  // communication.
  model_ = make_model(config.model, deferred_parameters(world.device()));
  const ParamChoices choices = resolve_optimizers(config, *model_);

  // Who computes what with whom.
  check_same_text(world, data.fingerprint);
  const comm::MeshGroups groups = world.groups(make_mesh(config.parallel, world.size()));
  root_ = shard_model(*model_, choices, groups, config, compute_.dtype);
  root_->init_parameters(static_cast<std::uint64_t>(config.train.seed), model_->init_rule());
  optimizer_ = optim::make_optimizer(root_, optimizer_spec(config));
  checkpoints_.emplace(config, world, root_, *optimizer_, data.fingerprint);
}

RunSummary Training::run() {
  // Before anything is written, so that a checkpoint that doesn't fit leaves the run as it was.
  const std::optional<Resumed> resumed = checkpoints_->resume();
  if (resumed) progress_ = resumed->progress;
  if (!resumed && !config_.model.from.empty()) start_from_ = load_start();
  metrics_.skipped = progress_.skipped;
  introduce(resumed);
  if (progress_.step >= steps_) {
    report_->say(fmt::format("nothing left to do: train.steps is {}", steps_));
    return summary();
  }
  for (Index i = progress_.step; i < steps_; ++i) {
    if (!step(i)) return summary();
  }
  return finish();
}

// Weights of others in the place of the random ones.
std::string Training::load_start() {
  std::string line = load_hf_weights(world_.all(), config_.model, root_->sharded_parameters());
  root_->mark_parameters_changed();
  return line;
}

void Training::introduce(const std::optional<Resumed>& resumed) {
  report_.emplace(world_.rank() == 0, config_.run.dir, progress_.step);
  report_->say(to_toml(config_));
  report_->say(headline(config_, world_, data_, *model_, compute_));
  report_->say(default_rules_text(config_.optimizer.kind) + optimizer_table(optimizer_->table()));
  if (world_.rank() == 0) write_file(report_->dir() / "config.toml", to_toml(config_));
  if (resumed) {
    for (const std::string& note : resumed->notes) report_->say(note);
    return;
  }
  if (!config_.checkpoint.resume.empty()) report_->say("no checkpoint to resume from yet: from the beginning");
  if (!start_from_.empty()) report_->say(start_from_);
  progress_.initial_val_loss = validate();
  report_->say(fmt::format("validation loss before training: {:.4f}", progress_.initial_val_loss));
}

double Training::validate() {
  return validation_loss(
      world_, *root_, *model_, data_.validation,
      {.sequences = config_.eval.sequences, .sequence = config_.train.sequence, .batch = config_.train.batch});
}

bool Training::step(Index step) {
  const StepMeter meter(*root_);
  const at::Tensor loss_sum = forward_backward(step);

  // What ranks must agree on besides the loss goes along.
  const int signal = stop_ ? stop_() : 0;
  const StepFlags flags = checkpoints_->flags(signal != 0);
  const at::Tensor sums = at::cat({loss_sum, at::tensor({flags.stop, flags.written}, loss_sum.options())});
  world_.all().all_reduce_sum(sums, "loss").wait();
  const at::Tensor totals = sums.cpu();

  metrics_.step = step + 1;
  metrics_.loss = totals[0].item<double>() / static_cast<double>(world_.size() * config_.train.accumulate);
  metrics_.lr = learning_rate(schedule_, step);
  update();
  report(meter);
  return save({.stop = totals[1].item<double>(), .written = totals[2].item<double>()}, signal);
}

// A micro-batch after the other. Gradients add up; they are reduced in the last one. Returns the sum of the losses,
// [1].
at::Tensor Training::forward_backward(Index step) {
  const TrainConfig& train = config_.train;
  at::Tensor loss_sum = at::zeros({1}, at::TensorOptions().dtype(at::kDouble).device(world_.device()));
  for (Index micro = 0; micro < train.accumulate; ++micro) {
    root_->set_requires_gradient_sync(train.sync_each_micro_batch || micro == train.accumulate - 1);
    const Index first = (world_.rank() * train.accumulate + micro) * train.batch;
    const Batch part = training_batch(
        data_.train, train.sequence, static_cast<std::uint64_t>(train.seed),
        {.step = step, .first = first, .count = train.batch});
    const at::Tensor loss = root_->call(*model_, part.tokens.to(world_.device()), part.targets.to(world_.device()));
    (loss / train.accumulate).backward();
    loss_sum += loss.detach();
  }
  return loss_sum;
}

// Clips and steps, without a pass for the clipping. A step whose gradients can't be trusted changes nothing and is
// counted, or ends the run; alike on all ranks, since loss and norm are.
void Training::update() {
  const optim::GradClip clip = optim::grad_clip(*root_, config_.train.clip);
  metrics_.grad_norm = clip.norm;
  const bool is_finite = std::isfinite(metrics_.loss) && std::isfinite(clip.norm);
  if (!is_finite && config_.train.nonfinite == "raise") fail_on_nonfinite(metrics_);
  metrics_.skipped += is_finite ? 0 : 1;
  optimizer_->set_lr(metrics_.lr);
  optimizer_->step({.grad = clip.factor, .skip = !is_finite});
  if (metrics_.step == steps_) held_ = measured_persistent_bytes(*root_, *optimizer_);
  root_->zero_grad();
}

// The clock stops before validation.
void Training::report(const StepMeter& meter) {
  const TrainConfig& train = config_.train;
  const double seconds = meter.seconds();
  progress_.step = metrics_.step;
  progress_.seconds += seconds;
  progress_.skipped = metrics_.skipped;
  measured_ = meter.bytes();
  metrics_.step_ms = 1000.0 * seconds;
  metrics_.tokens_per_s =
      static_cast<double>(world_.size() * train.batch * train.accumulate * train.sequence) / seconds;
  metrics_.comm_wait = meter.wait_seconds() / seconds;
  metrics_.peak_bytes = peak_memory_bytes(world_.device());
  metrics_.val_loss.reset();
  const bool is_due = config_.eval.every > 0 && metrics_.step % config_.eval.every == 0;
  if (metrics_.step == 1 || is_due || metrics_.step == steps_) metrics_.val_loss = validate();
  report_->step(metrics_, steps_, metrics_.val_loss || metrics_.step % train.log_every == 0);
}

// Ranks know from the sums what all of them do.
bool Training::save(const StepFlags& agreed, int signal) {
  for (const std::string& line : checkpoints_->after_step(progress_, agreed)) report_->say(line);
  if (agreed.stop == 0.0 || progress_.step == steps_) return true;
  const std::string name = signal != 0 ? signal_name(signal) : "a signal on another rank";
  report_->say(fmt::format(
      "stopped by {} after step {} of {}{}", name, progress_.step, steps_,
      checkpoints_->saves() ? "; --checkpoint.resume=auto goes on from here" : ""));
  return false;
}

RunSummary Training::summary() const {
  return {
      .steps = progress_.step,
      .parameters = parameter_count(*model_),
      .world_size = world_.size(),
      .param_dtype = compute_.dtype == at::kBFloat16 ? "bf16" : "fp32",
      .optimizer = config_.optimizer.kind,
      .skipped_steps = metrics_.skipped,
      .initial_val_loss = progress_.initial_val_loss};
}

RunSummary Training::finish() {
  // What the plan says of such a step, before sampling changes when parameters are dropped.
  RunSummary summary = this->summary();
  summary.planned =
      to_step_bytes(root_->forecast(static_cast<int>(config_.train.accumulate), config_.train.sync_each_micro_batch));
  summary.planned.persistent_bytes = planned_persistent_bytes(*root_, optimizer_->table(), optimizer_spec(config_));
  summary.measured = measured_;
  summary.measured.persistent_bytes = held_;
  summary.measured.padding_bytes = measure_padding(*root_, compute_.dtype);

  if (config_.eval.sample_bytes > 0) {
    root_->set_reshard_after_forward(false);
    const std::string text = generate(
        *root_, *model_, world_.device(), kPrompt,
        {.bytes = config_.eval.sample_bytes,
         .context = config_.train.sequence,
         .temperature = config_.eval.temperature,
         .seed = static_cast<std::uint64_t>(config_.train.seed)});
    report_->say(fmt::format("\nthe model writes:\n\n{}\n", printable(text)));
  }

  summary.seconds = progress_.seconds;
  summary.loss = metrics_.loss;
  summary.val_loss = *metrics_.val_loss;
  report_->finish(summary);
  return summary;
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
  return Training(config, world, data, stop).run();
}

}  // namespace ragged::train
