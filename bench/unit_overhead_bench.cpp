// Host time that sharding adds to a step: many tiny units, so that nothing else is left. 64 units of one 64 x 64 linear
// layer with bias, batch 8, fp32. World 1 against the same model unsharded; worlds 2 and 4 beside the raw collectives
// that such a step can't do without. Then what it saves to merge units of several sizes into one collective, by more
// and more bytes: where kMergeBytes (ragged/fsdp/options.h) comes from.
#include <ctime>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "bench/rank_threads.h"
#include "ragged/comm/compat.h"
#include "ragged/fsdp/unit.h"
#include "ragged/optim/adamw.h"

namespace ragged::bench {
namespace {

namespace compat = comm::compat;

constexpr int kUnits = 64;
constexpr Index kWidth = 64;

struct Layer : torch::nn::Module, fsdp::Shardable {
  explicit Layer(Index width) {
    weight = register_parameter("weight", (at::eye(width) * 0.9).requires_grad_(true));
    bias = register_parameter("bias", at::zeros({width}).requires_grad_(true));
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
  at::Tensor weight, bias;
};

struct Stack : torch::nn::Module, fsdp::Shardable {
  explicit Stack(Index width = kWidth, int units = kUnits) {
    for (int i = 0; i < units; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), std::make_shared<Layer>(width)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : layers) x = fsdp::call(*layer, x);
    return x.sum();
  }
  std::vector<std::shared_ptr<Layer>> layers;
};

struct Sharded {
  explicit Sharded(
      comm::World& world, std::optional<Index> merge_bytes = {},
      std::shared_ptr<Stack> stack = std::make_shared<Stack>())
      : model(std::move(stack)) {
    fsdp::FullyShardOptions options;
    options.groups = world.groups(layout::Mesh::shard(world.size()));
    options.reshard_after_forward = true;
    std::vector<std::shared_ptr<fsdp::Unit>> units;
    for (const auto& layer : model->layers) units.push_back(fsdp::fully_shard(*layer, options));
    root = fsdp::fully_shard(*model, options);
    root->set_runtime_options({.merge_bytes = merge_bytes});
    adamw = std::make_unique<optim::AdamW>(root, optim::AdamWOptions{});
  }
  void forward_backward(const at::Tensor& x) {
    root->zero_grad();
    root->call(*model, x).backward();
  }

  std::shared_ptr<Stack> model;
  std::shared_ptr<fsdp::Unit> root;
  std::unique_ptr<optim::AdamW> adamw;
};

double cpu_microseconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

void print_row(const char* what, double microseconds) {
  fmt::print("  {:<58} {:>9.1f}\n", what, microseconds / kUnits);
  std::fflush(stdout);
}

void world_of_one(Rank& rank, int rounds) {
  Stack plain;
  Sharded sharded(rank.world);
  const at::Tensor x = at::ones({8, kWidth}).requires_grad_(true);
  const auto run_plain = [&] {
    for (const at::Tensor& param : plain.parameters()) param.mutable_grad().reset();
    plain.forward(x).backward();
  };
  const auto run_sharded = [&] { sharded.forward_backward(x); };
  const auto run_step = [&] {
    sharded.forward_backward(x);
    sharded.adamw->step();
  };
  const std::vector<double> times = time_in_turns(rank, rounds, {run_plain, run_sharded, run_step});
  fmt::print("world 1, microseconds a unit and step (median of {} steps)\n", rounds);
  print_row("unsharded: forward, backward", times[0]);
  print_row("sharded: forward, backward", times[1]);
  print_row("sharded: forward, backward, AdamW", times[2]);
  print_row("sharded less unsharded", times[1] - times[0]);
  const double start = cpu_microseconds();
  for (int i = 0; i < rounds; ++i) run_plain();
  const double middle = cpu_microseconds();
  for (int i = 0; i < rounds; ++i) run_sharded();
  const double end = cpu_microseconds();
  print_row("the same in CPU time, mean", ((end - middle) - (middle - start)) / rounds);
}

void world_of_several(Rank& rank, int rounds) {
  Sharded merged(rank.world);
  Sharded alone(rank.world, 0);
  const at::Tensor x = at::ones({8, kWidth}).requires_grad_(true);
  const plan::BucketPlan& plan = *alone.root->units()[1]->plan();
  const plan::Segment& segment = plan.segments.at(0);
  c10d::ProcessGroup& group = *rank.world.all().process_group();
  const at::Tensor image = at::zeros({segment.numel});
  const at::Tensor shard = at::zeros({segment.shard_size});
  const at::Tensor own = image.narrow(0, rank.world.rank() * segment.shard_size, segment.shard_size);
  const auto run_raw = [&] {
    for (int i = 0; i < kUnits; ++i) {
      compat::all_gather(group, image, own)->wait();  // forward
      compat::all_gather(group, image, own)->wait();  // backward
      compat::reduce_scatter(group, shard, image, {})->wait();
    }
  };
  Stack plain;
  const auto run_plain = [&] {
    for (const at::Tensor& param : plain.parameters()) param.mutable_grad().reset();
    plain.forward(x).backward();
  };
  const auto step_of = [&x](Sharded& model) {
    return [&x, &model] {
      model.forward_backward(x);
      model.adamw->step();
    };
  };
  for (Sharded* model : {&alone, &merged}) step_of (*model)();  // the first forward doesn't know yet what comes next
  const auto collectives = [](const Sharded& model) {
    const comm::Traffic traffic = model.root->stats().traffic;
    return traffic.all_gathers + traffic.reduce_scatters;
  };
  const Index first_alone = collectives(alone);
  const Index first_merged = collectives(merged);
  const std::vector<double> times = time_in_turns(rank, rounds, {run_raw, run_plain, step_of(alone), step_of(merged)});
  if (!rank.is_first()) return;
  fmt::print("world {}, microseconds a unit and step (median of {} steps)\n", rank.world.size(), rounds);
  print_row("raw c10d: two all-gathers and a reduce-scatter, in turn", times[0]);
  print_row("unsharded: forward, backward, on all ranks at once", times[1]);
  print_row("sharded, each unit by itself: forward, backward, AdamW", times[2]);
  print_row("sharded, units merged: the same", times[3]);
  fmt::print(
      "  collectives a step: {} and {}\n", (collectives(alone) - first_alone) / (rounds + 2),
      (collectives(merged) - first_merged) / (rounds + 2));
}

// Forward and backward of 16 MiB or 64 units, whichever is less, with units of one size.
void merge_table(Rank& rank, int rounds, const std::vector<Index>& widths) {
  const std::vector<Index> limits{0, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20};
  if (rank.is_first()) {
    fmt::print(
        "world {}, microseconds a unit, forward and backward, by the limit in KiB\n  unit KiB", rank.world.size());
    for (const Index limit : limits) fmt::print(" {:>7}", limit >> 10);
    fmt::print("\n");
  }
  for (const Index width : widths) {
    const Index bytes = (width + 1) * width * 4;
    const int units = static_cast<int>(std::min<Index>(kUnits, (16 << 20) / bytes));
    const at::Tensor x = at::ones({8, width}).requires_grad_(true);
    std::vector<std::unique_ptr<Sharded>> models;
    std::vector<std::function<void()>> runs;
    for (const Index limit : limits) {
      models.push_back(std::make_unique<Sharded>(rank.world, limit, std::make_shared<Stack>(width, units)));
      runs.emplace_back([&x, model = models.back().get()] { model->forward_backward(x); });
    }
    const std::vector<double> times = time_in_turns(rank, rounds, runs);
    if (!rank.is_first()) continue;
    fmt::print("  {:>8}", bytes >> 10);
    for (const double time : times) fmt::print(" {:>7.0f}", time / units);
    fmt::print("\n");
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace ragged::bench

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 50;
  ragged::bench::run_rank_threads(1, [&](auto& rank) { ragged::bench::world_of_one(rank, rounds); });
  for (const int world : {2, 4}) {
    ragged::bench::run_rank_threads(world, [&](auto& rank) {
      ragged::bench::world_of_several(rank, rounds);
      ragged::bench::merge_table(rank, rounds, {31, 63, 127, 180, 255, 361, 511});
    });
  }
}
