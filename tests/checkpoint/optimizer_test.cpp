// States of every optimizer over any number of ranks: codes and scales of 8-bit moments, momentum, fp32 beside them,
// and those of SOAP, which lie whole on one rank, another one where there are more or fewer. A run that is saved and
// loaded between two steps takes the second one as if nothing had been.
#include <map>
#include <string>

#include <ATen/ATen.h>

#include "ragged/checkpoint/load.h"
#include "ragged/checkpoint/saver.h"
#include "ragged/optim/make_optimizer.h"
#include "tests/checkpoint/files.h"
#include "tests/checkpoint/trees.h"

namespace ragged::checkpoint {
namespace {

using ::ragged::testing::CheckpointFolder;
using test::MeshShape;
using test::WholeValues;
using ::testing::IsEmpty;

// Matrices whose tiles don't come out even, a stack, a vector, and one that never gets a gradient.
struct Shapes : torch::nn::Module, fsdp::Shardable {
  Shapes() {
    const std::map<std::string, std::vector<Index>> shapes = {
        {"rows40", {40, 70}}, {"rows33", {33, 40}}, {"experts", {5, 40, 9}}, {"norm", {33}}, {"unused", {34, 35}}};
    for (const auto& [name, shape] : shapes) {
      at::Tensor value = at::zeros(shape);
      fsdp::fill_initial_values(fsdp::normal(0.0, 0.3), 7, name, {0, value.numel()}, value.mutable_data_ptr<float>());
      tensors[name] = register_parameter(name, value.requires_grad_(true));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor sum = x.sum();
    for (const auto& [name, tensor] : tensors) {
      if (name != "unused") sum = sum + tensor.sum();
    }
    return sum;
  }
  std::map<std::string, at::Tensor> tensors;
};

struct Case {
  std::string name;
  optim::OptimizerSpec spec;
};

std::vector<Case> cases() {
  const auto rule = [](const std::string& match, const std::string& format) {
    return std::vector<optim::ParamRule>{{.match = match, .state_format = format}};
  };
  return {
      {"adamw", {.kind = "adamw"}},
      {"adamw bf16", {.kind = "adamw", .adamw = {.moment_dtype = at::kBFloat16}}},
      {"adamw8bit power", {.kind = "adamw8bit", .rules = rule("rows|experts|unused", "power")}},
      {"adamw8bit dynamic", {.kind = "adamw8bit", .rules = rule("rows|experts|unused", "dynamic")}},
      {"muon", {.kind = "muon"}},
      {"muon bf16", {.kind = "muon", .rules = rule("rows", "bf16")}},
      {"normuon in 8 bits",
       {.kind = "muon",
        .rules = rule("experts", "dynamic"),
        .muon = {.math = {.normuon = true}, .momentum_format = "power"}}},
      {"soap", {.kind = "soap", .soap = {.math = {.precondition_frequency = 1, .max_precondition_dim = 40}}}}};
}

struct Stepped {
  std::shared_ptr<Shapes> model = std::make_shared<Shapes>();
  std::shared_ptr<fsdp::Unit> root;
  std::unique_ptr<optim::Optimizer> optimizer;

  Stepped(comm::World& world, const MeshShape& mesh, const optim::OptimizerSpec& spec) {
    fsdp::FullyShardOptions options;
    options.groups = world.groups(mesh.mesh());
    options.shard_policy = optim::tile_rows_policy();
    root = fsdp::fully_shard(*model, options);
    optimizer = optim::make_optimizer(root, spec);
  }
  void step(int number) {
    root->call(*model, at::ones({1})).backward();
    test::make_up_gradients(*root, number);
    optimizer->step();
    root->zero_grad();
  }
  std::vector<Item> items() const {
    std::map<std::string, std::string> formats;
    for (const optim::OptimizerRow& row : optimizer->table()) formats[row.name] = row.state_format;
    std::vector<Item> all = model_items(root->sharded_parameters());
    for (Item& item : optimizer_items(optimizer->states(), formats)) all.push_back(std::move(item));
    return all;
  }
};

SaverOptions small_chunks() {
  return {.keep = 0, .chunk_bytes = 64};
}

class OptimizerStates : public ::testing::TestWithParam<Case> {};

TEST_P(OptimizerStates, load_into_any_number_of_ranks) {
  const MeshShape meshes[] = {{1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 7}, {2, 2}};
  for (const MeshShape& saved : meshes) {
    const CheckpointFolder root;
    WholeValues whole;
    test::run_ranks(saved.size(), [&](comm::World& world) {
      Stepped run(world, saved, GetParam().spec);
      for (int step = 0; step < 2; ++step) run.step(step);
      whole.add(run.items());
      Saver(world.all(), root.path(), small_chunks()).save(2, {.tensors = run.items()});
    });
    for (const MeshShape& loaded : meshes) {
      test::run_ranks(loaded.size(), [&](comm::World& world) {
        Stepped run(world, loaded, GetParam().spec);
        const auto items = run.items();
        test::fill(items, 5);
        load(world.all(), root / "step-2", items);
        EXPECT_THAT(whole.differing(items), IsEmpty()) << to_string(saved) << " -> " << to_string(loaded);
      });
    }
  }
}

TEST_P(OptimizerStates, continue_bit_for_bit) {
  for (const MeshShape& mesh : {MeshShape{1, 1}, MeshShape{1, 3}, MeshShape{2, 2}}) {
    const CheckpointFolder root;
    WholeValues after_three;
    test::run_ranks(mesh.size(), [&](comm::World& world) {
      Stepped run(world, mesh, GetParam().spec);
      for (int step = 0; step < 2; ++step) run.step(step);
      State state{.tensors = run.items()};
      for (std::size_t i = 0; const std::int64_t steps : run.optimizer->steps()) {
        state.facts.integers[std::to_string(i++)] = steps;
      }
      Saver(world.all(), root.path(), small_chunks()).save(2, state);
      run.step(2);
      after_three.add(run.items());
    });
    for (const MeshShape& loaded : {mesh, MeshShape{1, 2}}) {
      test::run_ranks(loaded.size(), [&](comm::World& world) {
        Stepped run(world, loaded, GetParam().spec);
        test::fill(run.items(), 5);
        const LoadReport report = load(world.all(), root / "step-2", run.items());
        std::vector<std::int64_t> steps;
        for (std::size_t i = 0; i < report.facts.integers.size(); ++i) {
          steps.push_back(report.facts.integers.at(std::to_string(i)));
        }
        run.optimizer->set_steps(steps);
        run.root->mark_parameters_changed();
        run.step(2);
        EXPECT_THAT(after_three.differing(run.items()), IsEmpty()) << to_string(mesh) << " -> " << to_string(loaded);
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoint, OptimizerStates, ::testing::ValuesIn(cases()), [](const auto& instance) {
  std::string name = instance.param.name;
  std::ranges::replace_if(
      name, [](char c) { return c == ' ' || c == '-'; }, '_');
  return name;
});

// Both are bytes of one shape; only the format tells them apart.
TEST(OptimizerFormats, codes_of_one_table_are_not_taken_for_those_of_another) {
  const CheckpointFolder root;
  test::run_ranks(2, [&](comm::World& world) {
    const std::vector<Case> all = cases();
    const Stepped power(world, {1, 2}, all[2].spec);
    const Stepped dynamic(world, {1, 2}, all[3].spec);
    Saver(world.all(), root.path()).save(1, {.tensors = power.items()});
    EXPECT_CHECKPOINT_ERROR(load(world.all(), root / "step-1", dynamic.items()), "in format 'dynamic");
    const Checkpoint checkpoint = Checkpoint::open(root / "step-1");
    ASSERT_NE(checkpoint.find("state.rows40.exp_avg.codes"), nullptr);
    EXPECT_THAT(checkpoint.find("state.rows40.exp_avg.codes")->format, ::testing::HasSubstr("power"));
    EXPECT_EQ(checkpoint.find("state.norm.exp_avg")->format, "");
  });
}

}  // namespace
}  // namespace ragged::checkpoint
