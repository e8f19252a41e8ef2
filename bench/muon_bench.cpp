// Muon's share of a training step, in time, operations and bytes on the wire: the model of a config, sharded over ranks
// that are threads; against forward and backward, and against AdamW's step on the same tree.
// Usage: muon_bench [config, default configs/muon.toml] [ranks, default 2] [rounds, default 15].
// What is compared runs in turns within a round, and the table has medians and ratios of them. On a CPU communication
// is the machine's own memory, so its time says little of a network; bytes do.
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "bench/rank_threads.h"
#include "ragged/optim/adamw8bit.h"
#include "ragged/optim/isa.h"
#include "ragged/optim/make_optimizer.h"
#include "ragged/train/language_model.h"
#include "ragged/train/optimizer_setup.h"

namespace ragged::bench {
namespace {

struct Sharded {
  std::shared_ptr<train::LanguageModel> model;
  std::shared_ptr<fsdp::Unit> root;
};

// Cut at strips of 32 rows, so that 8-bit states fit.
Sharded shard(comm::World& world, const train::Config& config) {
  Sharded sharded;
  sharded.model = train::make_model(config.model, train::deferred_parameters(world.device()));
  fsdp::FullyShardOptions options;
  options.groups = world.groups(layout::Mesh::shard(world.size()));
  options.shard_policy = optim::tile_rows_policy();
  std::vector<std::shared_ptr<fsdp::Unit>> layers;
  for (train::ShardableModule* layer : sharded.model->layer_modules())
    layers.push_back(fsdp::fully_shard(*layer, options));
  sharded.root = fsdp::fully_shard(*sharded.model, options);
  sharded.root->init_parameters(1, sharded.model->init_rule());
  return sharded;
}

struct Candidate {
  std::string name;
  std::unique_ptr<optim::Optimizer> optimizer;
};

std::vector<Candidate> candidates(const std::shared_ptr<fsdp::Unit>& root, const train::Config& config) {
  std::vector<Candidate> made;
  const auto add = [&](const std::string& name, const std::string& kind, const auto& change) {
    optim::OptimizerSpec spec = train::optimizer_spec(config);
    spec.kind = kind;
    spec.rules = {};
    change(spec);
    made.push_back({name, optim::make_optimizer(root, spec)});
  };
  const auto as_it_is = [](optim::OptimizerSpec&) {};
  add("AdamW", "adamw", as_it_is);
  add("AdamW8bit", "adamw8bit", as_it_is);
  add("Muon", "muon", as_it_is);
  add("Muon, Newton-Schulz in fp32", "muon",
      [](optim::OptimizerSpec& spec) { spec.muon.math.newton_schulz.dtype = at::kFloat; });
  add("Muon, bf16 through fp32", "muon",
      [](optim::OptimizerSpec& spec) { spec.muon.math.newton_schulz.native_bf16 = false; });
  add("Muon, momentum in 8 bits", "muon", [](optim::OptimizerSpec& spec) { spec.muon.momentum_format = "power"; });
  add("NorMuon", "muon", [](optim::OptimizerSpec& spec) { spec.muon.math.normuon = true; });
  return made;
}

// Operations of forward and backward: 6 for each weight of a matrix and token; attention's own products left out.
double model_flops(fsdp::Unit& root, double tokens) {
  double weights = 0.0;
  for (const buffer::ShardedTensor& param : root.sharded_parameters()) {
    if (param.shape.size() >= 2 && param.name.find("embed") == std::string::npos)
      weights += static_cast<double>(checked_product(param.shape));
  }
  return 6.0 * weights * tokens;
}

double muon_flops(fsdp::Unit& root, const train::Config& config) {
  const auto facts = optim::param_facts(root);
  const auto choices = optim::resolve("muon", {}, facts);
  const auto set = optim::newton_schulz_set(config.optimizer.newton_schulz);
  double flops = 0.0;
  for (std::size_t i = 0; i < facts.size(); ++i) {
    if (choices[i].kind != "muon") continue;
    const auto& shape = facts[i].shape;
    const Index rows = shape[shape.size() - 2];
    const auto count = static_cast<double>(checked_product(shape)) / static_cast<double>(rows * shape.back());
    flops += count * plan::newton_schulz_cost(rows, shape.back(), static_cast<int>(set.steps.size()));
  }
  return flops;
}

// What a rank sends, mean over ranks: of a gather's or reduction's whole image all but its own share.
double sent(const comm::Traffic& before, const comm::Traffic& after, int ranks) {
  const double share = (ranks - 1.0) / ranks;
  return static_cast<double>(
             after.gathered_bytes - before.gathered_bytes + after.reduced_bytes - before.reduced_bytes) *
      share +
      static_cast<double>(after.all_to_all_bytes - before.all_to_all_bytes);
}

void measure(Rank& rank, const train::Config& config, int rounds) {
  const int ranks = rank.world.size();
  const Sharded sharded = shard(rank.world, config);
  fsdp::Unit& root = *sharded.root;
  const at::Tensor tokens = at::randint(0, 256, {config.train.batch, config.train.sequence}, at::kLong);
  const at::Tensor targets = at::randint(0, 256, {config.train.batch, config.train.sequence}, at::kLong);
  std::vector<Candidate> optimizers = candidates(sharded.root, config);
  std::vector<std::function<void()>> turns;
  turns.emplace_back([&] {
    root.zero_grad();
    root.call(*sharded.model, tokens, targets).backward();
  });
  for (Candidate& candidate : optimizers) turns.emplace_back([&candidate] { candidate.optimizer->step(); });
  std::vector<double> bytes;
  for (const auto& turn : turns) {
    const comm::Traffic before = root.groups().shard.traffic();
    turn();
    bytes.push_back(sent(before, root.groups().shard.traffic(), ranks));
  }
  const std::vector<double> times = time_in_turns(rank, rounds, turns);
  if (!rank.is_first()) return;
  const double passes = model_flops(root, static_cast<double>(ranks * tokens.numel()));
  const double muon = muon_flops(root, config);
  fmt::print(
      "{} ranks on one machine, {} tokens each, {} rounds; native bf16 products: {}\n"
      "operations of a step, all ranks: forward and backward {:.2f} GFLOP, Muon {:.2f}, a ratio of {:.3f}\n\n"
      "{:<32} {:>10} {:>14} {:>10} {:>12} {:>10}\n",
      ranks, tokens.numel(), rounds, optim::has_bf16_products() ? "yes" : "no", passes * 1e-9, muon * 1e-9,
      muon / passes, "median", "ms", "of fwd + bwd", "of AdamW", "bytes sent", "of passes");
  for (std::size_t i = 0; i < turns.size(); ++i) {
    fmt::print(
        "{:<32} {:>10.2f} {:>13.1f}% {:>10.2f} {:>12.0f} {:>9.1f}%\n",
        i == 0 ? "forward and backward" : optimizers[i - 1].name, times[i] * 1e-3, 100.0 * times[i] / times[0],
        times[i] / times[1], bytes[i], 100.0 * bytes[i] / bytes[0]);
  }
}

}  // namespace
}  // namespace ragged::bench

int main(int argc, char** argv) {
  const std::string path = argc > 1 ? argv[1] : "configs/muon.toml";
  const int ranks = argc > 2 ? std::atoi(argv[2]) : 2;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 15;
  const ragged::train::Config config = ragged::train::load_config(path);
  ragged::bench::run_rank_threads(
      ranks, [&](ragged::bench::Rank& rank) { ragged::bench::measure(rank, config, rounds); });
}
