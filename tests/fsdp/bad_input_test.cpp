// Wrong calls are refused before anything is taken over or sent, with a message that says what to do.
#include <gtest/gtest.h>

#include "ragged/fsdp/deferred.h"
#include "tests/fsdp/blocks.h"
#include "tests/support/expect_error.h"

namespace ragged::test {
namespace {

using fsdp::fully_shard;

fsdp::FullyShardOptions alone() {
  return {};
}

TEST(BadInput, module_sharded_twice) {
  auto model = chain(2);
  auto unit = fully_shard(model->child(0), alone());
  EXPECT_INVALID(fully_shard(model->child(0), alone()), "isn't sharded yet");
  auto root = shard_chain(*model->add("more", chain(1)), 1, alone());
  EXPECT_INVALID(
      fully_shard(
          *model->add("again", linear_block())->add("x", chain(0)),
          fsdp::FullyShardOptions{.groups = {.mesh = layout::Mesh::shard(2)}}),
      "Expected groups that fit the mesh");
}

TEST(BadInput, tie_across_units_names_both_and_the_list_form) {
  auto model = chain(2);
  Block& a = model->child(0);
  Block& b = model->child(1);
  b.p.push_back(b.register_parameter("borrowed", a.p[0]));
  auto unit = fully_shard(a, alone());
  EXPECT_INVALID(fully_shard(b, alone()), "'borrowed' is tied to a parameter");
  EXPECT_INVALID(fully_shard(b, alone()), "fully_shard({&a, &b}, options)");
  EXPECT_TRUE(b.p[0].sum().item<double>() != 0.0) << "nothing was taken over";
}

TEST(BadInput, scalar_parameter) {
  auto model = std::make_shared<Block>(
      std::vector<std::vector<int64_t>>{{2}, {}}, [](Block&, const at::Tensor& x) { return x; });
  EXPECT_INVALID(fully_shard(*model, alone()), "got a scalar (param 'p1')");
}

TEST(BadInput, non_contiguous_parameter) {
  auto model = chain(0);
  model->register_parameter("slanted", at::ones({3, 2}).t().requires_grad_(true));
  EXPECT_INVALID(fully_shard(*model, alone()), "Expected contiguous parameters");
}

TEST(BadInput, mixed_dtypes_in_a_unit) {
  auto model = chain(0);
  model->register_parameter("half", at::ones({3}, at::kBFloat16).requires_grad_(true));
  EXPECT_INVALID(
      fully_shard(*model, alone()), "one dtype in a unit, but got Float (param 'p0') and BFloat16 (param 'half')");
}

TEST(BadInput, policys_nonsense_names_the_parameter) {
  auto model = chain(1);
  auto options = alone();
  for (const plan::Block& block :
       {plan::rows(0), plan::elements(-3), plan::rows(5), plan::elements(17), plan::tile(2, 0)}) {
    options.shard_policy = [&](const fsdp::ParamInfo&) { return block; };
    EXPECT_INVALID(fully_shard(model->child(0), options), "param 'p0'");
  }
}

TEST(BadInput, meta_parameter_names_the_remedy) {
  auto model = chain(0);
  model->register_parameter("meta", at::ones({3}, at::TensorOptions().device(c10::kMeta)).requires_grad_(true));
  EXPECT_INVALID(fully_shard(*model, alone()), "deferred_parameter()");
}

TEST(BadInput, parameters_never_initialised) {
  auto model = chain(0);
  model->p[0] = model->register_parameter("late", fsdp::deferred_parameter({4}).requires_grad_(true));
  auto root = fully_shard(*model, alone());
  EXPECT_INVALID(root->call(*model, input_of(0)), "Expected parameter 'late' to have values");
  root->init_parameters(1, [](const std::string&, std::span<const Index>) { return fsdp::constant(2.0); });
  EXPECT_NEAR(root->call(*model, at::ones({2, 4})).item<double>(), 2.0, 1e-6);
}

TEST(BadInput, unit_destroyed_before_the_root_was_made) {
  auto model = chain(1);
  fully_shard(model->child(0), alone());
  EXPECT_INVALID(fully_shard(*model, alone()), "was destroyed");
}

TEST(BadInput, unit_used_as_a_root_before) {
  auto model = chain(1);
  auto unit = fully_shard(model->child(0), alone());
  unit->sharded_parameters();
  EXPECT_INVALID(fully_shard(*model, alone()), "not to have run as roots");
}

TEST(BadInput, checkpointing_around_units) {
  auto model = chain(1);
  auto inner = fully_shard(model->child(0), alone());
  auto options = alone();
  options.activation_checkpointing = true;
  auto root = fully_shard(*model, options);
  EXPECT_INVALID(root->call(*model, input_of(0)), "activation checkpointing on units without units inside");
}

TEST(BadInput, no_modules_and_unknown_names) {
  EXPECT_INVALID(fully_shard(std::vector<torch::nn::Module*>{}, alone()), "at least one module");
  auto model = chain(1);
  auto root = shard_chain(*model, 1, alone());
  EXPECT_INVALID(root->full_parameter("layer9.p0"), "'layer9.p0'");
  EXPECT_INVALID(root->set_runtime_options({.backward_prefetch = -1}), "at least 0");
  EXPECT_INVALID(root->units()[1]->set_runtime_options({}), "Expected the root");
}

TEST(BadInput, ranks_that_plan_differently_all_learn_it) {
  for (int failing = 0; failing < 1; ++failing) {
    std::atomic<int> refused{0};
    run_ranks(
        3,
        [&](comm::World& world) {
          auto model = chain(2);
          fsdp::FullyShardOptions options;
          options.groups = world.groups(layout::Mesh::shard(3));
          options.shard_policy = [&](const fsdp::ParamInfo& p) -> std::optional<plan::Block> {
            if (p.shape.size() < 2) return std::nullopt;
            return plan::rows(world.rank() == 1 ? 4 : 1);
          };
          auto root = shard_chain(*model, 2, options);
          EXPECT_INVALID(root->call(*model, input_of(0)), "plan unit 'layer0' alike");
          ++refused;
        },
        quick());
    EXPECT_EQ(refused, 3);
  }
}

TEST(Init, values_dont_depend_on_the_layout) {
  std::map<std::string, at::Tensor> whole;
  const fsdp::InitFn rule = [](const std::string& name, std::span<const Index>) {
    return name.ends_with("layer0.p0") ? fsdp::uniform(-1.0, 3.0) : fsdp::normal(0.5, 0.1);
  };
  for (const int world_size : {1, 2, 3, 7}) {
    std::mutex mutex;
    run_ranks(
        world_size,
        [&](comm::World& world) {
          auto model = chain(2);
          fsdp::FullyShardOptions options;
          options.groups = world.groups(layout::Mesh::shard(world_size));
          auto root = shard_chain(*model, 2, options);
          root->init_parameters(42, rule);
          for (const auto& parameter : root->sharded_parameters()) {
            const at::Tensor full = root->full_parameter(parameter.name);
            const std::lock_guard lock(mutex);
            if (!whole.count(parameter.name)) whole[parameter.name] = full;
            EXPECT_TRUE(at::equal(whole[parameter.name], full)) << parameter.name << " at world " << world_size;
          }
        },
        quick());
  }
  EXPECT_EQ(whole.size(), 3U);
  EXPECT_FALSE(at::equal(whole["layer0.p0"], whole["layer1.p0"]));
  EXPECT_GE(whole["layer0.p0"].min().item<double>(), -1.0);
}

TEST(Init, rank0s_values_on_request) {
  run_ranks(
      4,
      [](comm::World& world) {
        auto model = chain(1);
        const at::Tensor original = model->child(0).p[0].detach().clone();
        {
          const at::NoGradGuard no_grad;
          for (auto& parameter : model->parameters()) parameter.add_(world.rank());
        }
        fsdp::FullyShardOptions options;
        options.groups = world.groups(layout::Mesh::hybrid(2, 2));
        options.sync_from_rank0 = true;
        auto root = shard_chain(*model, 1, options);
        EXPECT_TRUE(at::equal(root->full_parameter("layer0.p0"), original));
      },
      quick());
}

TEST(Init, normal_values_look_normal) {
  std::vector<float> values(20000);
  fsdp::fill_initial_values(fsdp::normal(2.0, 3.0), 5, "w", {0, 20000}, values.data());
  const at::Tensor sample = at::tensor(values);
  EXPECT_NEAR(sample.mean().item<double>(), 2.0, 0.08);
  EXPECT_NEAR(sample.std().item<double>(), 3.0, 0.08);
  std::vector<float> part(5);
  fsdp::fill_initial_values(fsdp::normal(2.0, 3.0), 5, "w", {777, 782}, part.data());
  EXPECT_TRUE(std::equal(part.begin(), part.end(), values.begin() + 777));
}

}  // namespace
}  // namespace ragged::test
