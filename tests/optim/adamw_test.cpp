// AdamW over flat shards: every layout gives the bits of the twin that updates whole tensors one element at a time.
#include "ragged/optim/adamw.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/optim/adamw_twin.h"
#include "tests/optim/trees.h"
#include "tests/support/expect_error.h"

namespace ragged::test {
namespace {

using buffer::ShardedTensor;
using optim::AdamW;
using optim::AdamWOptions;

const std::vector<MeshShape> kMeshes{{1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 7}, {2, 2}};
const TwinOptions kTwin{.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-7, .weight_decay = 0.2};

AdamWOptions options() {
  return {
      .lr = kTwin.lr, .beta1 = kTwin.beta1, .beta2 = kTwin.beta2, .eps = kTwin.eps, .weight_decay = kTwin.weight_decay};
}

// What a rank saw, by name: compared between layouts.
using Twins = std::map<std::string, TwinParameter>;

Twins twins_of(const std::function<bool(const std::string&, at::IntArrayRef)>& decays) {
  Twins twins;
  const auto model = make_tiny_model();
  for (const auto& item : model->named_parameters()) {
    twins.emplace(
        item.key(), TwinParameter(values_of(item.value().reshape({-1})), decays(item.key(), item.value().sizes())));
  }
  return twins;
}

bool is_used(const std::string& name) {
  return !name.ends_with("unused");
}

void update(
    Twins& twins, int step, const std::function<float(float)>& round = [](float x) { return x; }) {
  for (auto& [name, twin] : twins) {
    if (!is_used(name)) continue;
    twin.update(kTwin, made_up_gradient(name, static_cast<Index>(twin.value.size()), step), round);
  }
}

void expect_equal(const std::vector<ShardedTensor>& pieces, const Twins& twins) {
  ASSERT_EQ(pieces.size(), twins.size());
  for (const ShardedTensor& piece : pieces) {
    ASSERT_TRUE(twins.count(piece.name)) << piece.name;
    EXPECT_EQ(values_of(piece.local), cut(twins.at(piece.name).value, piece.owned)) << piece.name;
  }
}

// The states, in the order of the parameters: first moment, second moment.
void expect_equal_states(const AdamW& adamw, fsdp::Unit& root, const Twins& twins, at::ScalarType dtype) {
  const auto parameters = root.sharded_parameters();
  const auto states = adamw.states();
  ASSERT_EQ(states.size(), 2 * parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const ShardedTensor& parameter = parameters[i];
    const TwinParameter& twin = twins.at(parameter.name);
    for (const bool second : {false, true}) {
      const ShardedTensor& state = states[2 * i + (second ? 1 : 0)];
      EXPECT_EQ(state.name, parameter.name + (second ? ".exp_avg_sq" : ".exp_avg"));
      EXPECT_EQ(state.shape, parameter.shape);
      EXPECT_EQ(state.owned, parameter.owned);
      EXPECT_EQ(state.unit, parameter.unit);
      EXPECT_EQ(state.index, parameter.index);
      EXPECT_EQ(state.placements, parameter.placements);
      EXPECT_EQ(state.dtype, dtype);
      EXPECT_EQ(state.local.scalar_type(), dtype);
      EXPECT_EQ(values_of(state.local), cut(second ? twin.exp_avg_sq : twin.exp_avg, state.owned)) << state.name;
    }
  }
}

void run_steps(
    const MeshShape& mesh, const AdamWOptions& adamw_options, Twins twins, const std::function<float(float)>& round) {
  constexpr int kSteps = 4;
  std::vector<Twins> expected;
  for (int step = 0; step < kSteps; ++step) {
    update(twins, step, round);
    expected.push_back(twins);
  }
  run_ranks(
      mesh.size(),
      [&](comm::World& world) {
        SCOPED_TRACE(to_string(mesh));
        Tree tree = make_tree(world, mesh);
        AdamW adamw(tree.root, adamw_options);
        for (int step = 0; step < kSteps; ++step) {
          backward(tree, world.rank(), step);
          make_up_gradients(*tree.root, step);
          adamw.step();
          tree.root->zero_grad();
          expect_equal(tree.root->sharded_parameters(), expected[static_cast<std::size_t>(step)]);
        }
        expect_equal_states(adamw, *tree.root, expected.back(), adamw_options.moment_dtype);
      },
      quick());
}

float as_stored(float value) {
  return value;
}
float as_bfloat16(float value) {
  return static_cast<float>(at::BFloat16(value));
}

TEST(AdamW, gives_the_twins_bits_in_every_layout) {
  const auto matrices = [](const std::string&, at::IntArrayRef shape) { return shape.size() >= 2; };
  for (const MeshShape& mesh : kMeshes) run_steps(mesh, options(), twins_of(matrices), as_stored);
}

TEST(AdamW, keeps_moments_in_bfloat16) {
  const auto matrices = [](const std::string&, at::IntArrayRef shape) { return shape.size() >= 2; };
  AdamWOptions halved = options();
  halved.moment_dtype = at::kBFloat16;
  for (const MeshShape& mesh : {MeshShape{1, 1}, MeshShape{1, 3}}) {
    run_steps(mesh, halved, twins_of(matrices), as_bfloat16);
  }
}

TEST(AdamW, decays_what_the_caller_says_by_global_shape) {
  const auto rule = [](const std::string& name, at::IntArrayRef) { return name.ends_with("down") || name == "norm"; };
  AdamWOptions own = options();
  own.policy = [&](const ShardedTensor& parameter) {
    const std::vector<Index> shape = parameter.name == "norm" ? std::vector<Index>{12} : std::vector<Index>{12, 19};
    const bool decays = rule(parameter.name, {});
    if (decays) {
      EXPECT_EQ(parameter.shape, shape);
    }
    return optim::ParamSettings{.weight_decay = decays ? own.weight_decay : 0.0};
  };
  for (const MeshShape& mesh : {MeshShape{1, 1}, MeshShape{1, 3}}) run_steps(mesh, own, twins_of(rule), as_stored);
}

TEST(AdamW, follows_the_learning_rate) {
  run_ranks(
      1,
      [&](comm::World& world) {
        Tree tree = make_tree(world, {1, 1});
        AdamW adamw(tree.root, options());
        EXPECT_EQ(adamw.lr(), kTwin.lr);
        adamw.set_lr(0.0);
        EXPECT_EQ(adamw.lr(), 0.0);
        const auto before = values_of(tree.root->sharded_parameters()[0].local);
        backward(tree, 0);
        adamw.step();
        EXPECT_EQ(values_of(tree.root->sharded_parameters()[0].local), before);  // no decay either
        EXPECT_INVALID(adamw.set_lr(-1e-3), "[adamw] Expected lr >= 0");
        EXPECT_EQ(adamw.lr(), 0.0);
        AdamW moved = std::move(adamw);
        moved.set_lr(1e-3);
        moved.step();
        EXPECT_NE(values_of(tree.root->sharded_parameters()[0].local), before);
      },
      quick());
}

// Two parameters, one of which a step may leave out.
struct Branches : torch::nn::Module, fsdp::Shardable {
  Branches() {
    always = register_parameter("always", at::ones({7, 3}).requires_grad_(true));
    sometimes = register_parameter("sometimes", at::ones({5, 3}).requires_grad_(true));
    last = register_parameter("last", at::ones({4}).requires_grad_(true));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x.matmul(always.t()).sum() + last.sum();
    return use ? y + x.matmul(sometimes.t()).sum() : y;
  }

  at::Tensor always, sometimes, last;
  bool use = true;
};

TEST(AdamW, leaves_a_parameter_without_gradient_alone) {
  // Used in steps 1, 2, 4: two others go on, this one neither decays nor counts.
  const std::vector<bool> used{true, true, false, true};
  for (const int world_size : {1, 2, 3, 7}) {
    run_ranks(
        world_size,
        [&](comm::World& world) {
          auto model = std::make_shared<Branches>();
          fsdp::FullyShardOptions sharding;
          sharding.groups = world.groups(layout::Mesh::shard(world_size));
          const auto root = fsdp::fully_shard(*model, sharding);
          AdamW adamw(root, options());
          Twins twins;
          twins.emplace("always", TwinParameter(std::vector<float>(21, 1.0F), true));
          twins.emplace("sometimes", TwinParameter(std::vector<float>(15, 1.0F), true));
          twins.emplace("last", TwinParameter(std::vector<float>(4, 1.0F), false));
          for (int step = 0; step < 4; ++step) {
            model->use = used[static_cast<std::size_t>(step)];
            root->call(*model, at::ones({2, 3})).backward();
            make_up_gradients(*root, step);
            adamw.step();
            root->zero_grad();
            for (auto& [name, twin] : twins) {
              if (name == "sometimes" && !model->use) continue;
              twin.update(kTwin, made_up_gradient(name, static_cast<Index>(twin.value.size()), step));
            }
            expect_equal(root->sharded_parameters(), twins);
          }
          EXPECT_EQ(twins.at("sometimes").step, 3);
          expect_equal_states(adamw, *root, twins, at::kFloat);
        },
        quick());
  }
}

TEST(AdamW, does_nothing_without_gradients) {
  run_ranks(
      2,
      [&](comm::World& world) {
        Tree tree = make_tree(world, {1, 2});
        AdamW adamw(tree.root, options());
        std::vector<std::vector<float>> before;
        for (const auto& p : tree.root->sharded_parameters()) before.push_back(values_of(p.local));
        adamw.step();
        std::size_t i = 0;
        for (const auto& p : tree.root->sharded_parameters()) EXPECT_EQ(values_of(p.local), before[i++]) << p.name;
      },
      quick());
}

TEST(AdamW, is_seen_by_the_next_forward) {
  run_ranks(
      2,
      [&](comm::World& world) {
        Tree tree = make_tree(world, {1, 2});
        AdamW adamw(tree.root, options());
        backward(tree, world.rank());
        adamw.step();
        tree.root->zero_grad();
        // The root keeps its image after forward; the step makes it stale.
        const auto parameters = tree.root->sharded_parameters();
        for (const auto& p : parameters) {
          const auto full = values_of(tree.root->full_parameter(p.name).reshape({-1}));
          EXPECT_EQ(values_of(p.local), cut(full, p.owned)) << p.name;
        }
      },
      quick());
}

TEST(AdamW, refuses_options_out_of_range) {
  run_ranks(
      1,
      [&](comm::World& world) {
        Tree tree = make_tree(world, {1, 1});
        const double nan = std::nan("");
        EXPECT_INVALID(AdamW(tree.root, {.lr = -1.0}), "[adamw] Expected lr >= 0, but got -1");
        EXPECT_INVALID(AdamW(tree.root, {.lr = nan}), "[adamw] Expected lr >= 0");
        EXPECT_INVALID(AdamW(tree.root, {.beta1 = 1.0}), "[adamw] Expected beta1 in [0, 1), but got 1");
        EXPECT_INVALID(AdamW(tree.root, {.beta1 = -0.1}), "beta1");
        EXPECT_INVALID(AdamW(tree.root, {.beta2 = 1.5}), "[adamw] Expected beta2 in [0, 1), but got 1.5");
        EXPECT_INVALID(AdamW(tree.root, {.beta2 = nan}), "beta2");
        EXPECT_INVALID(AdamW(tree.root, {.eps = -1e-8}), "[adamw] Expected eps >= 0");
        EXPECT_INVALID(AdamW(tree.root, {.weight_decay = -0.1}), "[adamw] Expected weight_decay >= 0");
        EXPECT_INVALID(
            AdamW(tree.root, {.moment_dtype = at::kHalf}), "[adamw] Expected moment_dtype fp32 or bf16, but got Half");
      },
      quick());
}

TEST(AdamW, steps_what_its_policy_takes_as_it_says) {
  run_ranks(
      2,
      [&](comm::World& world) {
        Tree tree = make_tree(world, {1, 2});
        AdamWOptions own = options();
        own.policy = [](const ShardedTensor& parameter) {
          optim::ParamSettings settings{
              .takes = parameter.name != "head", .lr_scale = parameter.name == "embed" ? 0.5 : 1.0};
          if (parameter.name == "norm") settings.state_format = "bf16";
          return settings;
        };
        AdamW adamw(tree.root, own);
        std::map<std::string, TwinParameter> twins =
            twins_of([](const std::string&, at::IntArrayRef shape) { return shape.size() >= 2; });
        const std::vector<float> head = twins.at("head").value;
        backward(tree, world.rank());
        make_up_gradients(*tree.root, 0);
        adamw.step({.grad = 0.5, .skip = true});
        expect_equal(tree.root->sharded_parameters(), twins);
        adamw.step({.grad = 0.5});
        for (auto& [name, twin] : twins) {
          if (!is_used(name) || name == "head") continue;
          TwinOptions twin_options = kTwin;
          if (name == "embed") {
            twin_options.lr *= 0.5;
          }
          std::vector<float> grad = made_up_gradient(name, static_cast<Index>(twin.value.size()), 0);
          for (float& value : grad) value *= 0.5F;
          twin.update(twin_options, grad);
        }
        expect_equal(tree.root->sharded_parameters(), twins);

        const auto parameters = tree.root->sharded_parameters();
        const auto steps = adamw.steps();
        const auto table = adamw.table();
        ASSERT_EQ(steps.size(), parameters.size());
        ASSERT_EQ(table.size(), parameters.size() - 1);
        std::size_t row = 0;
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          const std::string& name = parameters[i].name;
          EXPECT_EQ(steps[i], is_used(name) && name != "head" ? 1 : 0) << name;
          if (name == "head") continue;
          EXPECT_EQ(table[row].name, name);
          EXPECT_EQ(table[row].shape, parameters[i].shape);
          EXPECT_EQ(table[row].optimizer, "adamw");
          EXPECT_EQ(table[row].state_format, name == "norm" ? "bf16" : "fp32");
          EXPECT_EQ(table[row].block, "element");
          EXPECT_EQ(table[row].state_bytes, parameters[i].local.numel() * (name == "norm" ? 4 : 8));
          ++row;
        }
        for (const ShardedTensor& state : adamw.states()) {
          EXPECT_FALSE(state.name.starts_with("head"));
          EXPECT_EQ(state.dtype, state.name.starts_with("norm.") ? at::kBFloat16 : at::kFloat);
        }
      },
      quick());
}

TEST(AdamW, continues_from_states_and_counts) {
  const auto matrices = [](const std::string&, at::IntArrayRef shape) { return shape.size() >= 2; };
  Twins twins = twins_of(matrices);
  for (int step = 0; step < 4; ++step) update(twins, step);
  run_ranks(
      3,
      [&](comm::World& world) {
        Tree tree = make_tree(world, {1, 3});
        auto adamw = std::make_unique<AdamW>(tree.root, options());
        for (int step = 0; step < 4; ++step) {
          if (step == 2) {
            auto next = std::make_unique<AdamW>(tree.root, options());
            const auto from = adamw->states();
            const auto to = next->states();
            for (std::size_t i = 0; i < to.size(); ++i) to[i].local.copy_(from[i].local);
            next->set_steps(adamw->steps());
            adamw = std::move(next);
          }
          backward(tree, world.rank(), step);
          make_up_gradients(*tree.root, step);
          adamw->step();
          tree.root->zero_grad();
        }
        expect_equal(tree.root->sharded_parameters(), twins);
        expect_equal_states(*adamw, *tree.root, twins, at::kFloat);
        EXPECT_INVALID(adamw->set_steps({1}), "[adamw] Expected a count of steps for each of");
      },
      quick());
}

TEST(AdamW, refuses_settings_out_of_range) {
  run_ranks(
      1,
      [&](comm::World& world) {
        Tree tree = make_tree(world, {1, 1});
        const auto with = [](const optim::ParamSettings& settings) {
          AdamWOptions own;
          own.policy = [settings](const ShardedTensor&) { return settings; };
          return own;
        };
        EXPECT_INVALID(AdamW(tree.root, with({.takes = false})), "[adamw] Expected a policy that takes at least one");
        EXPECT_INVALID(AdamW(tree.root, with({.lr_scale = -0.5})), "[adamw] Expected lr_scale >= 0");
        EXPECT_INVALID(AdamW(tree.root, with({.weight_decay = -0.5})), "the policy gave 1 and -0.5");
        EXPECT_INVALID(
            AdamW(tree.root, with({.state_format = "power"})),
            "[adamw] Expected the state format fp32 or bf16, but got 'power'");
      },
      quick());
}

struct DoubleModule : torch::nn::Module {
  DoubleModule() { weight = register_parameter("weight", at::ones({3, 3}, at::kDouble).requires_grad_(true)); }
  at::Tensor weight;
};

TEST(AdamW, refuses_masters_that_are_not_fp32) {
  run_ranks(
      1,
      [&](comm::World& world) {
        DoubleModule model;
        fsdp::FullyShardOptions sharding;
        sharding.groups = world.groups(layout::Mesh::shard(1));
        const auto root = fsdp::fully_shard(model, sharding);
        EXPECT_INVALID(AdamW(root, {}), "[adamw] Expected fp32 masters, but got Double (param 'weight')");
      },
      quick());
}

}  // namespace
}  // namespace ragged::test
