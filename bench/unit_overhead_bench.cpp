// Host time that sharding adds to a step: many tiny units, so that nothing else is left. 64 units of one 64 x 64 linear
// layer with bias, batch 8, fp32. World 1 against the same model unsharded; world 2 beside the raw collectives that
// such a step can't do without.
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
  Layer() {
    weight = register_parameter("weight", (at::eye(kWidth) * 0.9).requires_grad_(true));
    bias = register_parameter("bias", at::zeros({kWidth}).requires_grad_(true));
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
  at::Tensor weight, bias;
};

struct Stack : torch::nn::Module, fsdp::Shardable {
  Stack() {
    for (int i = 0; i < kUnits; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), std::make_shared<Layer>()));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : layers) x = fsdp::call(*layer, x);
    return x.sum();
  }
  std::vector<std::shared_ptr<Layer>> layers;
};

struct Sharded {
  Sharded(comm::World& world) : model(std::make_shared<Stack>()) {
    fsdp::FullyShardOptions options;
    options.groups = world.groups(layout::Mesh::shard(world.size()));
    options.reshard_after_forward = true;
    std::vector<std::shared_ptr<fsdp::Unit>> units;
    for (const auto& layer : model->layers) units.push_back(fsdp::fully_shard(*layer, options));
    root = fsdp::fully_shard(*model, options);
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

void world_of_two(Rank& rank, int rounds) {
  Sharded sharded(rank.world);
  const at::Tensor x = at::ones({8, kWidth}).requires_grad_(true);
  const plan::BucketPlan& plan = *sharded.root->units()[1]->plan();
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
  const auto run_step = [&] {
    sharded.forward_backward(x);
    sharded.adamw->step();
  };
  Stack plain;
  const auto run_plain = [&] {
    for (const at::Tensor& param : plain.parameters()) param.mutable_grad().reset();
    plain.forward(x).backward();
  };
  const std::vector<double> times = time_in_turns(rank, rounds, {run_raw, run_step, run_plain});
  if (!rank.is_first()) return;
  fmt::print("world 2, microseconds a unit and step (median of {} steps)\n", rounds);
  print_row("raw c10d: two all-gathers and a reduce-scatter, in turn", times[0]);
  print_row("unsharded: forward, backward, on both ranks at once", times[2]);
  print_row("sharded: forward, backward, AdamW", times[1]);
  fmt::print("  {:<58} {:>9.2f}\n", "sharded over (raw + unsharded)", times[1] / (times[0] + times[2]));
}

}  // namespace
}  // namespace ragged::bench

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 50;
  ragged::bench::run_rank_threads(1, [&](auto& rank) { ragged::bench::world_of_one(rank, rounds); });
  ragged::bench::run_rank_threads(2, [&](auto& rank) { ragged::bench::world_of_two(rank, rounds); });
}
