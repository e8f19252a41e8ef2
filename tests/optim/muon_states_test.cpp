// Muon's options that add or shrink states: NorMuon's rows and momentum in 8 bits. Against twins on whole parameters,
// and bit for bit across worlds, states included.
#include <map>
#include <mutex>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ragged/optim/adamw8bit.h"
#include "ragged/optim/muon.h"
#include "ragged/optim/muon_tiles.h"
#include "ragged/optim/muon_tiles_kernel.h"
#include "tests/optim/muon_twin.h"
#include "tests/optim/trees.h"
#include "tests/support/expect_error.h"

namespace ragged::test {
namespace {

using optim::Isa;
using optim::Muon;
using optim::MuonOptions;
using optim::MuonReplicas;
using optim::TileFormat;

const std::vector<MeshShape> kMeshes{{1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 7}, {2, 2}};
constexpr int kSteps = 3;

// Rows that tiles don't divide, a stack, the weight of a convolution, a matrix of one row, and a vector that isn't
// Muon's.
const std::map<std::string, std::vector<Index>> kShapes{{"rows40", {40, 70}},    {"rows33", {33, 31}},
                                                        {"experts", {3, 40, 9}}, {"conv", {6, 3, 2, 2}},
                                                        {"one_row", {1, 5}},     {"norm", {33}}};

struct Shapes : torch::nn::Module, fsdp::Shardable {
  Shapes() {
    for (const auto& [name, shape] : kShapes) {
      at::Tensor value = at::zeros(shape);
      fsdp::fill_initial_values(fsdp::normal(0.0, 0.3), 7, name, {0, value.numel()}, value.mutable_data_ptr<float>());
      tensors[name] = register_parameter(name, value.requires_grad_(true));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor sum = x.sum();
    for (const auto& [name, tensor] : tensors) sum = sum + tensor.sum();
    return sum;
  }
  std::map<std::string, at::Tensor> tensors;
};

MuonOptions options(bool normuon, const std::string& format, MuonReplicas replicas = MuonReplicas::kRepeat) {
  return {
      .lr = 0.02,
      .weight_decay = 0.1,
      .math = {.newton_schulz = {.dtype = at::kFloat}, .wire_dtype = at::kFloat, .normuon = normuon},
      .movement = {.replicas = replicas},
      .momentum_format = format};
}

using Values = std::map<std::string, std::vector<float>>;

// Parameters and states as a whole, put together from what ranks own; bytes as numbers.
Values run(const MeshShape& mesh, const MuonOptions& given, bool tile_rows) {
  Values whole;
  std::mutex mutex;
  run_ranks(mesh.size(), [&](comm::World& world) {
    auto model = std::make_shared<Shapes>();
    fsdp::FullyShardOptions sharding;
    sharding.groups = world.groups(mesh.mesh());
    if (tile_rows) {  // the convolution's one matrix has a single strip, all of it
      sharding.shard_policy = [](const fsdp::ParamInfo& param) -> std::optional<plan::Block> {
        return param.shape.size() == 4 ? plan::whole() : optim::tile_rows_policy()(param);
      };
    }
    auto root = fsdp::fully_shard(*model, sharding);
    Muon muon(root, given);
    for (int step = 0; step < kSteps; ++step) {
      root->call(*model, at::ones({1})).backward();
      make_up_gradients(*root, step);
      muon.step({.grad = 0.5});
      root->zero_grad();
    }
    std::vector<buffer::ShardedTensor> all = root->sharded_parameters();
    for (const auto& state : muon.states()) all.push_back(state);
    const std::scoped_lock lock(mutex);
    for (const buffer::ShardedTensor& tensor : all) {
      auto& values = whole[tensor.name];
      const auto numel = static_cast<std::size_t>(numel_of(tensor));
      values.resize(numel, std::numeric_limits<float>::quiet_NaN());
      const auto piece = values_of(tensor.local.reshape({-1}));
      EXPECT_EQ(static_cast<Index>(piece.size()), tensor.owned.size()) << tensor.name;
      std::copy(piece.begin(), piece.end(), values.begin() + tensor.owned.begin);
    }
  });
  return whole;
}

void expect_near(
    const std::vector<float>& got, const std::vector<double>& want, double tolerance, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], tolerance) << what << " " << i;
}

struct Option {
  std::string name;
  bool normuon;
  std::string format;
};
class MuonStates : public ::testing::TestWithParam<Option> {};

TEST_P(MuonStates, every_world_gives_the_bits_of_one_rank_and_they_are_near_the_twin) {
  const auto [name, normuon, format] = GetParam();
  const bool tiled = format != "fp32";
  const Values alone = run({1, 1}, options(normuon, format), tiled);
  int twins = 0;
  const auto model = Shapes();
  for (const auto& [param, shape] : kShapes) {
    if (shape.size() < 2) continue;
    ++twins;
    const auto initial = values_of(model.tensors.at(param).reshape({-1}));
    MuonTwin twin(shape, initial, {.format = format, .normuon = normuon});
    for (int step = 0; step < kSteps; ++step) {
      auto grad = made_up_gradient(param, static_cast<Index>(initial.size()), step);
      for (float& g : grad) g *= 0.5F;
      twin.update(grad);
    }
    expect_near(alone.at(param), twin.value, 2e-5, param);
    if (tiled) {
      EXPECT_EQ(alone.at(param + ".momentum.codes"), std::vector<float>(twin.codes.begin(), twin.codes.end())) << param;
      EXPECT_EQ(alone.at(param + ".momentum.scales"), twin.scales) << param;
    } else {
      EXPECT_EQ(alone.at(param + ".momentum"), twin.momentum) << param;
    }
    if (normuon) expect_near(alone.at(param + ".row_exp_avg_sq"), twin.row_exp_avg_sq, 1e-6, param + " rows");
  }
  EXPECT_EQ(twins, 5);
  for (const MeshShape& mesh : kMeshes) {
    for (const MuonReplicas replicas : {MuonReplicas::kRepeat, MuonReplicas::kShare}) {
      if (replicas == MuonReplicas::kShare && mesh.replicate == 1) continue;
      EXPECT_EQ(run(mesh, options(normuon, format, replicas), tiled), alone) << to_string(mesh);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Options, MuonStates,
    ::testing::Values(
        Option{"normuon", true, "fp32"}, Option{"power", false, "power"}, Option{"dynamic", false, "dynamic"},
        Option{"normuon_power", true, "power"}),
    [](const auto& instance) { return instance.param.name; });

// Wire in bf16: rows' states still travel as fp32, two elements each. Newton-Schulz in bf16 too, by whatever
// instructions there are.
TEST(NorMuon, states_cross_a_wire_in_bf16_unharmed) {
  MuonOptions given = options(true, "fp32");
  given.math.newton_schulz.dtype = at::kBFloat16;
  given.math.wire_dtype = at::kBFloat16;
  const Values alone = run({1, 1}, given, false);
  for (const MeshShape& mesh : {MeshShape{1, 3}, MeshShape{1, 7}, MeshShape{2, 2}}) {
    given.movement.replicas = mesh.replicate > 1 ? MuonReplicas::kShare : MuonReplicas::kRepeat;
    EXPECT_EQ(run(mesh, given, false), alone) << to_string(mesh);
  }
}

// Rows of 40 x 40, the first 20 with gradients a hundred times as large: Muon leaves the others behind, NorMuon brings
// all to the same length, and the whole to Muon's.
TEST(NorMuon, rows_get_equal_length_and_the_matrix_keeps_its_own) {
  // Rank-deficient, so that orthogonalisation can't even rows out by itself.
  at::Tensor grad = at::mm(at::randn({40, 4}), at::randn({4, 40}));
  grad.narrow(0, 0, 20).mul_(100.0);
  const auto stepped = [&](bool normuon) {
    at::Tensor param = at::zeros({40, 40});
    at::Tensor rows = at::zeros({40});
    auto math = options(normuon, "fp32").math;
    optim::MuonPlan plan({{.name = "w", .shape = {40, 40}, .held = {{0, 1600}}}}, math, {}, {});
    plan.step({std::initializer_list<optim::MuonPiece>{
        {.param = param.view({-1}),
         .grad = grad.view({-1}),
         .momentum = at::zeros({1600}),
         .lr = 1.0,
         .weight_decay = 0.0,
         .row_exp_avg_sq = rows}}});
    return param;
  };
  const at::Tensor muon = stepped(false);
  const at::Tensor normuon = stepped(true);
  EXPECT_NEAR(normuon.norm().item<double>(), muon.norm().item<double>(), 1e-4);
  const at::Tensor lengths = normuon.square().sum(1).sqrt();
  EXPECT_LT((lengths.max() / lengths.min()).item<double>(), 1.001);  // the first step divides by a row's own length
  const at::Tensor before = muon.square().sum(1).sqrt();
  EXPECT_GT((before.max() / before.min()).item<double>(), 2.0);
}

TEST(NorMuon, zeros_and_missing_gradients_leave_rows_alone_or_let_them_decay) {
  const at::Tensor start = at::randn({4, 6});
  const at::Tensor param = start.clone();
  const at::Tensor rows = at::full({4}, 0.5F);
  optim::MuonPlan plan({{.name = "w", .shape = {4, 6}, .held = {{0, 24}}}}, options(true, "fp32").math, {}, {});
  std::vector<optim::MuonPiece> pieces{
      {.param = param.view({-1}), .grad = {}, .momentum = at::zeros({24}), .row_exp_avg_sq = rows}};
  plan.step(pieces);
  EXPECT_TRUE(at::equal(rows, at::full({4}, 0.5F)));
  pieces[0].grad = at::zeros({24});
  plan.step(pieces);
  EXPECT_TRUE(at::equal(rows, at::full({4}, 0.5F * 0.95F)));
  EXPECT_TRUE(at::equal(param, start * static_cast<float>(1.0 - 1e-3 * 0.1)));
  pieces[0].row_exp_avg_sq = at::zeros({5});
  EXPECT_INVALID(plan.step(pieces), "row_exp_avg_sq of 4 fp32 numbers");
  auto math = options(true, "fp32").math;
  math.row_beta2 = 1.0;
  EXPECT_INVALID(optim::MuonPlan({}, math, {}, {}), "row_beta2 in [0, 1)");
}

// --- momentum in 8 bits, the pass by itself ---

std::vector<Isa> available() {
  std::vector<Isa> found;
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (optim::has_isa(isa)) found.push_back(isa);
  }
  return found;
}

optim::TiledMomentum tiled_momentum(const std::vector<Index>& shape, TileFormat format) {
  const auto geometry = optim::tile_geometry(shape, {0, checked_product(shape)}, "w");
  return {
      .codes = at::full({geometry.numel}, static_cast<int>(optim::zero_code(format, true)), at::kByte),
      .scales = at::zeros({geometry.num_tiles()}),
      .geometry = geometry,
      .format = format};
}

TEST(MuonTiles, the_pass_has_the_bits_of_the_twin_in_all_dtypes) {
  for (const std::string format : {"power", "dynamic"}) {
    for (const std::vector<Index>& shape : std::vector<std::vector<Index>>{{40, 70}, {1, 1}, {33, 129}, {3, 40, 9}}) {
      for (const bool nesterov : {true, false}) {
        for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
          const Index numel = checked_product(shape);
          const auto tile_format = format == "power" ? TileFormat::kPower : TileFormat::kDynamic;
          const auto momentum = tiled_momentum(shape, tile_format);
          MuonTwin twin(
              shape, std::vector<float>(static_cast<std::size_t>(numel), 0.0F),
              {.beta = 0.9F, .nesterov = nesterov, .format = format});
          for (int step = 0; step < 4; ++step) {
            at::Tensor grad = at::tensor(made_up_gradient("w", numel, step)).to(dtype);
            if (step == 2) grad[numel / 2].fill_(std::numeric_limits<float>::infinity());
            const at::Tensor out = at::empty({numel}, dtype);
            optim::muon_pack_tiles_pass({.momentum = 0.9F, .nesterov = nesterov}, 0.5, grad, momentum, out);
            const auto directions = twin.pack(values_of(grad * 0.5));
            ASSERT_TRUE(at::equal(momentum.codes, at::tensor(twin.codes))) << format << " " << step;
            ASSERT_TRUE(at::equal(momentum.scales, at::tensor(twin.scales))) << format << " " << step;
            EXPECT_TRUE(at::allclose(out.to(at::kFloat), at::tensor(directions).to(dtype).to(at::kFloat), 0, 0, true));
          }
        }
      }
    }
  }
}

TEST(MuonTiles, every_instruction_set_has_the_same_bits) {
  for (const TileFormat format : {TileFormat::kPower, TileFormat::kDynamic}) {
    std::vector<at::Tensor> first;
    for (const Isa isa : available()) {
      const auto momentum = tiled_momentum({32, 50}, format);
      const at::Tensor grad = at::tensor(made_up_gradient("w", 1600, 1));
      const at::Tensor out = at::empty({1600});
      for (int step = 0; step < 3; ++step) {
        optim::muon_pack_tiles(
            {.format = format},
            {.grads = {.data = grad.const_data_ptr()},
             .codes = momentum.codes.mutable_data_ptr<std::uint8_t>(),
             .scales = momentum.scales.mutable_data_ptr<float>(),
             .out = {.data = out.mutable_data_ptr()},
             .stride = 50,
             .rows = 32,
             .columns = 50},
            isa);
      }
      const std::vector<at::Tensor> got{momentum.codes, momentum.scales, out};
      if (first.empty()) first = got;
      for (std::size_t i = 0; i < got.size(); ++i)
        EXPECT_TRUE(at::equal(got[i], first[i])) << to_string(isa) << " " << i;
    }
  }
}

// The route of other devices and dtypes, here for fp64 gradients: to a code or two, since ATen's root may round
// otherwise.
TEST(MuonTiles, other_dtypes_come_near_through_aten) {
  const auto ours = tiled_momentum({40, 70}, TileFormat::kPower);
  const auto atens = tiled_momentum({40, 70}, TileFormat::kPower);
  for (int step = 0; step < 3; ++step) {
    const at::Tensor grad = at::tensor(made_up_gradient("w", 2800, step));
    const at::Tensor a = at::empty({2800});
    const at::Tensor b = at::empty({2800}, at::kDouble);
    optim::muon_pack_tiles_pass({}, 0.5, grad, ours, a);
    optim::muon_pack_tiles_pass({}, 0.5, grad.to(at::kDouble), atens, b);
    EXPECT_TRUE(at::allclose(a, b.to(at::kFloat), 1e-5, 1e-7));
    EXPECT_TRUE(at::allclose(ours.scales, atens.scales));
    const at::Tensor apart = (ours.codes.to(at::kInt) - atens.codes.to(at::kInt)).abs();
    EXPECT_LE(apart.gt(0).sum().item<Index>(), 3);
  }
}

TEST(MuonTiles, without_gradients_the_momentum_ends_at_zero_and_never_grows) {
  for (const TileFormat format : {TileFormat::kPower, TileFormat::kDynamic}) {
    const auto momentum = tiled_momentum({32, 32}, format);
    const at::Tensor out = at::empty({1024});
    optim::muon_pack_tiles_pass({}, 1.0, at::randn({1024}), momentum, out);
    float scale = momentum.scales[0].item<float>();
    for (int step = 0; step < 2000; ++step) {
      optim::muon_pack_tiles_pass({}, 1.0, at::zeros({1024}), momentum, out);
      const float next = momentum.scales[0].item<float>();
      ASSERT_LE(next, scale);
      scale = next;
    }
    EXPECT_EQ(scale, 0.0F);
    EXPECT_TRUE(at::equal(out, at::zeros({1024})));
  }
}

TEST(MuonTiles, refuse_cut_tiles_alike_on_all_ranks_and_unknown_formats) {
  run_ranks(3, [](comm::World& world) {
    auto model = std::make_shared<Shapes>();
    fsdp::FullyShardOptions sharding;
    sharding.groups = world.groups(layout::Mesh::shard(3));
    auto root = fsdp::fully_shard(*model, sharding);
    EXPECT_INVALID(Muon(root, options(false, "power")), "tile_rows_policy()");
    EXPECT_INVALID(Muon(root, options(false, "int8")), "fp32, bf16, power or dynamic");
    // Plain pieces: rank 0 alone cuts a tile, all hear of it.
    optim::MuonPlan plan(
        {{.name = "w", .shape = {64, 2}, .held = {{0, 66}, {66, 128}, {128, 128}}}}, options(false, "power").math, {},
        sharding.groups.shard);
    const Index numel = world.rank() == 0 ? 66 : world.rank() == 1 ? 62 : 0;
    std::vector<optim::MuonPiece> pieces{
        {.param = at::ones({numel}),
         .grad = at::ones({numel}),
         .momentum = at::zeros({numel}, at::kByte),
         .momentum_scales = at::zeros({2})}};
    EXPECT_INVALID(plan.step(pieces), "Expected whole strips");
    pieces[0].momentum_scales = at::Tensor();
    EXPECT_INVALID(plan.step(pieces), "momentum_scales with a momentum in uint8");
  });
}

TEST(Muon, table_says_what_states_there_are) {
  run_ranks(1, [](comm::World& world) {
    auto model = std::make_shared<Shapes>();
    fsdp::FullyShardOptions sharding;
    sharding.groups = world.groups(layout::Mesh::shard(1));
    auto root = fsdp::fully_shard(*model, sharding);
    std::map<std::string, optim::OptimizerRow> rows;
    for (const auto& row : Muon(root, options(true, "power")).table()) rows[row.name] = row;
    ASSERT_EQ(rows.size(), 5U);
    const optim::OptimizerRow& row = rows.at("rows40");
    EXPECT_EQ(row.optimizer, "normuon");
    EXPECT_EQ(row.state_format, "power 32x32");
    EXPECT_EQ(row.block, "32 rows");
    EXPECT_EQ(row.state_bytes, 40 * 70 + 4 * 2 * 3 + 4 * 40);
    EXPECT_EQ(rows.at("conv").state_bytes, 72 + 4 * 1 + 4 * 6);
    EXPECT_EQ(rows.at("experts").state_bytes, 3 * 40 * 9 + 4 * 3 * 2 + 4 * 3 * 40);
    EXPECT_EQ(Muon(root, options(false, "fp32")).table()[0].optimizer, "muon");
  });
}

}  // namespace
}  // namespace ragged::test
