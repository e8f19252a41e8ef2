// AdamW8bit over sharded trees: every layout gives the bits of the twin that updates whole matrices tile by tile.
#include "ragged/optim/adamw8bit.h"

#include <atomic>
#include <map>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ragged/optim/tile_geometry.h"
#include "tests/optim/adamw8bit_twin.h"
#include "tests/optim/trees.h"
#include "tests/support/expect_error.h"

namespace ragged::test {
namespace {

using buffer::ShardedTensor;
using optim::AdamW8bit;
using optim::AdamW8bitOptions;

const std::vector<MeshShape> kMeshes{{1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 7}, {2, 2}};
const TwinOptions kTwin{.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-7, .weight_decay = 0.2};
constexpr float kClip = 0.37F;

const std::map<std::string, std::vector<Index>> kShapes{
    {"one_row", {1, 97}},    {"rows31", {31, 33}},    {"rows32", {32, 64}}, {"rows33", {33, 40}}, {"rows40", {40, 70}},
    {"rows4096", {4096, 5}}, {"experts", {5, 40, 9}}, {"norm", {33}},       {"wte", {70, 64}},    {"small", {32, 33}},
};
// By its rule these would be fp32, for their size; the test wants tiles.
bool is_tiled(const std::string& name) {
  return name.starts_with("rows") || name == "one_row" || name == "experts";
}

struct Shapes : torch::nn::Module, fsdp::Shardable {
  Shapes() {
    for (const auto& [name, shape] : kShapes) {
      at::Tensor value = at::zeros(shape);
      fsdp::fill_initial_values(fsdp::normal(0.0, 0.3), 7, name, {0, value.numel()}, value.mutable_data_ptr<float>());
      tensors.push_back(register_parameter(name, value.requires_grad_(true)));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor sum = x.sum();
    for (const at::Tensor& tensor : tensors) sum = sum + tensor.sum();
    return sum;
  }
  std::vector<at::Tensor> tensors;
};

fsdp::ShardPolicy whole_policy() {
  return [](const fsdp::ParamInfo&) { return plan::whole(); };
}

struct ShapesTree {
  std::shared_ptr<Shapes> model = std::make_shared<Shapes>();
  std::shared_ptr<fsdp::Unit> root;

  ShapesTree(comm::World& world, const MeshShape& mesh, const fsdp::ShardPolicy& policy) {
    fsdp::FullyShardOptions options;
    options.groups = world.groups(mesh.mesh());
    options.shard_policy = policy;
    root = fsdp::fully_shard(*model, options);
  }
  void backward() { root->call(*model, at::ones({1})).backward(); }
};

AdamW8bitOptions options(const std::string& format, bool guards = true) {
  AdamW8bitOptions o{
      .lr = kTwin.lr, .beta1 = kTwin.beta1, .beta2 = kTwin.beta2, .eps = kTwin.eps, .weight_decay = kTwin.weight_decay};
  o.state_format = format;
  o.guards = guards;
  o.policy = [format](const ShardedTensor& param) {
    optim::ParamSettings settings;
    if (is_tiled(param.name)) settings.state_format = format;
    return settings;
  };
  return o;
}

struct Twins {
  std::map<std::string, TwinTiled> tiled;
  std::map<std::string, TwinParameter> plain;

  explicit Twins(const TwinTileOptions& tile_options) {
    const Shapes model;
    for (const auto& item : model.named_parameters()) {
      const auto shape = item.value().sizes().vec();
      const auto values = values_of(item.value().reshape({-1}));
      if (is_tiled(item.key())) {
        tiled.emplace(item.key(), TwinTiled(shape, values, tile_options));
      } else {
        plain.emplace(item.key(), TwinParameter(values, shape.size() >= 2));
      }
    }
  }
  static std::vector<float> gradient(const std::string& name, std::size_t numel, int step) {
    std::vector<float> grad = made_up_gradient(name, static_cast<Index>(numel), step);
    for (float& value : grad) value *= kClip;
    return grad;
  }
  void update(int step) {
    for (auto& [name, twin] : tiled) twin.update(kTwin, gradient(name, twin.value.size(), step));
    for (auto& [name, twin] : plain) twin.update(kTwin, gradient(name, twin.value.size(), step));
  }
  const std::vector<float>& value(const std::string& name) const {
    return tiled.count(name) ? tiled.at(name).value : plain.at(name).value;
  }
};

Index collectives(const fsdp::Unit& root) {
  const comm::Traffic traffic = root.stats().traffic;
  return traffic.all_gathers + traffic.reduce_scatters + traffic.all_reduces + traffic.all_to_alls + traffic.others;
}

template <class T>
std::vector<T> piece_of(const std::vector<T>& whole, layout::Interval owned) {
  return {whole.begin() + owned.begin, whole.begin() + owned.end};
}

std::vector<std::uint8_t> bytes_of(const at::Tensor& codes) {
  return {codes.const_data_ptr<std::uint8_t>(), codes.const_data_ptr<std::uint8_t>() + codes.numel()};
}

void expect_codes(const ShardedTensor& state, const ShardedTensor& param, const std::vector<std::uint8_t>& codes) {
  EXPECT_EQ(state.dtype, at::kByte);
  EXPECT_EQ(state.shape, param.shape);
  EXPECT_EQ(state.placements, param.placements);
  EXPECT_EQ(state.owned, param.owned);
  EXPECT_EQ(bytes_of(state.local), piece_of(codes, param.owned)) << state.name;
}

void expect_scales(const ShardedTensor& state, const ShardedTensor& param, const std::vector<float>& scales, int rank) {
  EXPECT_EQ(state.dtype, at::kFloat);
  EXPECT_EQ(state.shape, optim::scales_shape(param.shape));
  EXPECT_EQ(state.owned, optim::owned_scales(param.shape, param.owned, param.name));
  EXPECT_EQ(values_of(state.local), piece_of(scales, state.owned)) << state.name;
  // The placement says the same as the interval.
  for (const auto& placement : state.placements) {
    if (const auto* ragged = std::get_if<layout::RaggedShard>(&placement)) {
      const auto interval = layout::ragged_interval(state.shape, *ragged, rank);
      EXPECT_EQ(interval.size(), state.owned.size());
      if (!interval.empty()) {
        EXPECT_EQ(interval, state.owned);
      }
    }
  }
}

void expect_states(const AdamW8bit& adamw, fsdp::Unit& root, const Twins& twins, int shard_rank) {
  std::map<std::string, ShardedTensor> states;
  for (const ShardedTensor& state : adamw.states()) states.emplace(state.name, state);
  std::size_t expected = 0;
  for (const ShardedTensor& param : root.sharded_parameters()) {
    const auto at = [&](const char* suffix) -> const ShardedTensor& { return states.at(param.name + suffix); };
    if (const auto twin = twins.tiled.find(param.name); twin != twins.tiled.end()) {
      expect_codes(at(".exp_avg.codes"), param, twin->second.first_codes);
      expect_codes(at(".exp_avg_sq.codes"), param, twin->second.second_codes);
      expect_scales(at(".exp_avg.scales"), param, twin->second.first_scales, shard_rank);
      expect_scales(at(".exp_avg_sq.scales"), param, twin->second.second_scales, shard_rank);
      expected += 4;
    } else {
      const TwinParameter& plain = twins.plain.at(param.name);
      EXPECT_EQ(values_of(at(".exp_avg").local), cut(plain.exp_avg, param.owned)) << param.name;
      EXPECT_EQ(values_of(at(".exp_avg_sq").local), cut(plain.exp_avg_sq, param.owned)) << param.name;
      expected += 2;
    }
  }
  EXPECT_EQ(states.size(), expected);
}

void run_steps(
    const MeshShape& mesh, const AdamW8bitOptions& adamw_options, const fsdp::ShardPolicy& policy, const Twins& initial,
    const Twins& expected, int steps) {
  std::atomic<int> owns_nothing_of_something = 0;
  run_ranks(
      mesh.size(),
      [&](comm::World& world) {
        SCOPED_TRACE(to_string(mesh));
        ShapesTree tree(world, mesh, policy);
        AdamW8bit adamw(tree.root, adamw_options);
        const int shard_rank = world.rank() % mesh.shard;
        expect_states(adamw, *tree.root, initial, shard_rank);
        for (int step = 0; step < steps; ++step) {
          tree.backward();
          make_up_gradients(*tree.root, step);
          const Index before = collectives(*tree.root);
          adamw.step({.grad = double{kClip}});
          EXPECT_EQ(collectives(*tree.root), before);
          tree.root->zero_grad();
        }
        for (const ShardedTensor& param : tree.root->sharded_parameters()) {
          EXPECT_EQ(values_of(param.local), cut(expected.value(param.name), param.owned)) << param.name;
          if (param.local.numel() == 0) ++owns_nothing_of_something;
        }
        expect_states(adamw, *tree.root, expected, shard_rank);
        EXPECT_EQ(adamw.non_finite_gradients(), 0);
        EXPECT_EQ(adamw.steps(), std::vector<std::int64_t>(kShapes.size(), steps));
      },
      quick());
  if (mesh.shard > 1) {
    EXPECT_GT(owns_nothing_of_something, 0);
  }
}

TEST(AdamW8bit, gives_the_twins_bits_in_every_layout) {
  for (const std::string format : {"power", "dynamic"}) {
    const Twins initial({.dynamic = format == "dynamic"});
    Twins expected = initial;
    for (int step = 0; step < 20; ++step) expected.update(step);
    for (const MeshShape& mesh : kMeshes) {
      run_steps(mesh, options(format), optim::tile_rows_policy(), initial, expected, 20);
    }
    for (const MeshShape& mesh : {MeshShape{1, 3}, MeshShape{1, 7}}) {
      run_steps(mesh, options(format), whole_policy(), initial, expected, 20);
    }
  }
}

TEST(AdamW8bit, leaves_the_guards_out_where_it_is_told) {
  const Twins initial({.dynamic = true, .guards = false});
  Twins expected = initial;
  for (int step = 0; step < 3; ++step) expected.update(step);
  run_steps({1, 3}, options("dynamic", false), optim::tile_rows_policy(), initial, expected, 3);
}

TEST(AdamW8bit, keeps_what_is_small_flat_or_an_embedding_in_fp32) {
  run_ranks(
      2,
      [&](comm::World& world) {
        ShapesTree tree(world, {1, 2}, optim::tile_rows_policy());
        AdamW8bit adamw(tree.root, {});
        std::map<std::string, optim::OptimizerRow> rows;
        for (const auto& row : adamw.table()) rows.emplace(row.name, row);
        EXPECT_EQ(rows.size(), kShapes.size());
        for (const auto& [name, row] : rows) {
          EXPECT_EQ(row.optimizer, "adamw8bit");
          EXPECT_EQ(row.shape, kShapes.at(name));
          EXPECT_EQ(row.state_format, name == "rows4096" ? "power 32x32" : "fp32") << name;
          EXPECT_EQ(row.block, name == "rows4096" ? "32 rows" : "element") << name;
        }
        for (const ShardedTensor& param : tree.root->sharded_parameters()) {
          const Index numel = param.local.numel();
          const Index bytes = param.name == "rows4096" ? 2 * (numel + numel / (32 * 5) * 4) : 8 * numel;
          EXPECT_EQ(rows.at(param.name).state_bytes, bytes) << param.name;
        }
      },
      quick());
}

TEST(AdamW8bit, knows_embeddings_and_heads_by_the_name_of_their_module) {
  const auto named = [](const std::string& name) {
    ShardedTensor param;
    param.name = name;
    param.shape = {512, 64};
    return param;
  };
  for (const char* name :
       {"embed", "model.embed_tokens.weight", "tok_embeddings.weight", "transformer.wte.weight", "wpe",
        "lm_head.weight", "head", "score_head.weight"}) {
    EXPECT_TRUE(optim::keeps_fp32(named(name))) << name;
  }
  for (const char* name :
       {"layers.0.up", "layers.0.up.weight", "multihead.qkv.weight", "weight", "embed.layers.0.down", "heads.weight",
        "embedder.proj.weight"}) {
    EXPECT_FALSE(optim::keeps_fp32(named(name))) << name;
  }
}

TEST(AdamW8bit, steps_only_what_its_policy_takes) {
  run_ranks(
      2,
      [&](comm::World& world) {
        ShapesTree tree(world, {1, 2}, optim::tile_rows_policy());
        AdamW8bitOptions some;
        some.policy = [](const ShardedTensor& param) {
          return optim::ParamSettings{.takes = param.name == "rows4096" || param.name == "norm"};
        };
        AdamW8bit adamw(tree.root, some);
        EXPECT_EQ(adamw.states().size(), 4U + 2U);
        std::map<std::string, std::vector<float>> before;
        for (const auto& param : tree.root->sharded_parameters()) before[param.name] = values_of(param.local);
        tree.backward();
        adamw.step();
        const auto steps = adamw.steps();
        std::size_t i = 0;
        for (const auto& param : tree.root->sharded_parameters()) {
          const bool mine = param.name == "rows4096" || param.name == "norm";
          EXPECT_EQ(steps[i++], mine ? 1 : 0);
          if (param.local.numel() > 0) {
            EXPECT_EQ(values_of(param.local) != before[param.name], mine) << param.name;
          }
        }
      },
      quick());
}

// What is written into another's states, with its counts, goes on as that one would.
TEST(AdamW8bit, continues_from_states_and_counts) {
  for (const std::string format : {"power", "dynamic"}) {
    Twins expected({.dynamic = format == "dynamic"});
    const Twins initial = expected;
    for (int step = 0; step < 4; ++step) expected.update(step);
    run_ranks(
        3,
        [&](comm::World& world) {
          ShapesTree tree(world, {1, 3}, optim::tile_rows_policy());
          auto adamw = std::make_unique<AdamW8bit>(tree.root, options(format));
          for (int step = 0; step < 4; ++step) {
            if (step == 2) {
              auto next = std::make_unique<AdamW8bit>(tree.root, options(format));
              const auto from = adamw->states();
              const auto to = next->states();
              for (std::size_t i = 0; i < to.size(); ++i) to[i].local.copy_(from[i].local);
              next->set_steps(adamw->steps());
              adamw = std::move(next);
            }
            tree.backward();
            make_up_gradients(*tree.root, step);
            adamw->step({.grad = double{kClip}});
            tree.root->zero_grad();
          }
          expect_states(*adamw, *tree.root, expected, world.rank());
        },
        quick());
  }
}

TEST(AdamW8bit, skips_and_counts_what_is_not_finite) {
  run_ranks(
      2,
      [&](comm::World& world) {
        ShapesTree tree(world, {1, 2}, optim::tile_rows_policy());
        AdamW8bit adamw(tree.root, options("power"));
        tree.backward();
        for (const auto& grad : tree.root->sharded_gradients()) {
          if (grad.name == "rows4096") grad.local[0] = std::nan("");
        }
        const auto values = [&] {
          std::vector<std::vector<float>> all;
          for (const auto& param : tree.root->sharded_parameters()) all.push_back(values_of(param.local));
          return all;
        };
        const auto before = values();
        adamw.step({.skip = true});
        EXPECT_EQ(values(), before);
        EXPECT_EQ(adamw.steps(), std::vector<std::int64_t>(kShapes.size(), 0));
        EXPECT_EQ(adamw.non_finite_gradients(), 0);
        adamw.step();
        EXPECT_EQ(adamw.non_finite_gradients(), 1);  // each rank has one
      },
      quick());
}

TEST(AdamW8bit, refuses_a_plan_that_cuts_tiles_on_all_ranks) {
  std::atomic<int> refused = 0;
  run_ranks(
      3,
      [&](comm::World& world) {
        const ShapesTree tree(world, {1, 3}, [](const fsdp::ParamInfo& param) -> std::optional<plan::Block> {
          return param.name == "rows4096" ? std::optional(plan::rows(100)) : std::nullopt;
        });
        AdamW8bitOptions only;
        only.policy = [](const ShardedTensor& param) {
          return optim::ParamSettings{.takes = param.name == "rows4096"};
        };
        EXPECT_INVALID(
            AdamW8bit(tree.root, only),
            "cut 32 x 32 tiles (param 'rows4096'). Shard it with a shard_policy that returns "
            "rows(32) for it, as tile_rows_policy() does.");
        ++refused;
      },
      quick());
  EXPECT_EQ(refused, 3);
}

TEST(AdamW8bit, refuses_options_and_settings_out_of_range) {
  run_ranks(
      1,
      [&](comm::World& world) {
        const ShapesTree tree(world, {1, 1}, optim::tile_rows_policy());
        const auto& root = tree.root;
        EXPECT_INVALID(AdamW8bit(root, {.lr = -1.0}), "[adamw8bit] Expected lr >= 0, but got -1");
        EXPECT_INVALID(AdamW8bit(root, {.beta2 = 1.0}), "[adamw8bit] Expected beta2 in [0, 1)");
        AdamW8bitOptions bad;
        bad.state_format = "int8";
        EXPECT_INVALID(AdamW8bit(root, bad), "[adamw8bit] Expected the state format power or dynamic, but got 'int8'");
        const auto with = [](const optim::ParamSettings& settings) {
          AdamW8bitOptions o;
          o.policy = [settings](const ShardedTensor&) { return settings; };
          return o;
        };
        EXPECT_INVALID(
            AdamW8bit(root, with({.takes = false})), "[adamw8bit] Expected a policy that takes at least one");
        EXPECT_INVALID(AdamW8bit(root, with({.lr_scale = -1.0})), "[adamw8bit] Expected lr_scale >= 0");
        EXPECT_INVALID(AdamW8bit(root, with({.weight_decay = -1.0})), "weight_decay >= 0");
        EXPECT_INVALID(
            AdamW8bit(root, with({.state_format = "bf16"})),
            "[adamw8bit] Expected the state format fp32, power or dynamic");
        EXPECT_INVALID(
            AdamW8bit(root, with({.state_format = "power"})), "(param 'norm'). Give it the state format \"fp32\".");
        AdamW8bit adamw(root, {});
        EXPECT_INVALID(adamw.set_lr(-1.0), "[adamw8bit] Expected lr >= 0");
        EXPECT_INVALID(
            adamw.set_steps({1, 2}), "[adamw8bit] Expected a count of steps for each of 10 parameters, but got 2");
        EXPECT_INVALID(adamw.set_steps(std::vector<std::int64_t>(10, -1)), "[adamw8bit] Expected counts of steps >= 0");
      },
      quick());
}

}  // namespace
}  // namespace ragged::test
