// Muon over trees and over plain pieces: against a twin on whole matrices, bit for bit across worlds, and what travels.
#include "ragged/optim/muon.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/optim/trees.h"
#include "tests/support/expect_error.h"

namespace ragged::test {
namespace {

using layout::Interval;
using optim::Muon;
using optim::MuonMovement;
using optim::MuonOptions;
using optim::MuonParam;
using optim::MuonPiece;
using optim::MuonPlan;
using optim::MuonReplicas;
using optim::MuonScale;

const std::vector<MeshShape> kMeshes{{1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 7}, {2, 2}};
constexpr int kSteps = 3;

optim::MuonMath exact() {
  return {.newton_schulz = {.dtype = at::kFloat}, .wire_dtype = at::kFloat};
}

MuonOptions options(MuonReplicas replicas = MuonReplicas::kRepeat, int in_flight = 2) {
  return {
      .lr = 0.02,
      .weight_decay = 0.1,
      .math = exact(),
      .movement = {.replicas = replicas, .buckets_in_flight = in_flight}};
}

// The published algorithm on a whole matrix, in double precision.
struct Twin {
  at::Tensor param, momentum;

  void update(const at::Tensor& grad, double lr, double decay, double beta) {
    momentum = momentum * beta + grad * (1.0 - beta);
    at::Tensor x = grad * (1.0 - beta) + momentum * beta;
    const bool tall = x.size(0) > x.size(1);
    if (tall) x = x.t();
    x = x / (x.norm() + 1e-300);
    for (int i = 0; i < 5; ++i) {
      const at::Tensor a = at::mm(x, x.t());
      x = x * 3.4445 + at::mm(a * -4.7750 + at::mm(a, a) * 2.0315, x);
    }
    if (tall) x = x.t();
    const double ratio = static_cast<double>(grad.size(0)) / static_cast<double>(grad.size(1));
    param = param * (1.0 - lr * decay) - x * (lr * std::sqrt(std::max(1.0, ratio)));
  }
};

using Values = std::map<std::string, std::vector<float>>;

struct Outcome {
  Values params{};  // whole, by name
  comm::Traffic traffic;
};

Outcome run(comm::World& world, const MeshShape& mesh, const MuonOptions& given, bool whole_tensors = false) {
  Tree tree = make_tree(world, mesh, whole_tensors);
  Muon muon(tree.root, given);
  comm::Traffic in_steps;
  for (int step = 0; step < kSteps; ++step) {
    backward(tree, world.rank(), step);
    make_up_gradients(*tree.root, step);
    const auto start = tree.root->groups().shard.traffic();
    muon.step({.grad = 0.5});
    const auto end = tree.root->groups().shard.traffic();
    in_steps.all_to_alls += end.all_to_alls - start.all_to_alls;
    in_steps.all_to_all_bytes += end.all_to_all_bytes - start.all_to_all_bytes;
    in_steps.all_gathers += end.all_gathers - start.all_gathers;
    tree.root->zero_grad();
  }
  Outcome result{.traffic = in_steps};
  for (const auto& param : tree.root->sharded_parameters())
    result.params[param.name] = values_of(tree.root->full_parameter(param.name).reshape({-1}));
  return result;
}

TEST(Muon, every_world_gives_the_bits_of_one_rank_and_they_are_near_the_twin) {
  Values alone;
  run_ranks(1, [&](comm::World& world) { alone = run(world, {1, 1}, options()).params; });

  const auto model = make_tiny_model();
  int matrices = 0;
  for (const auto& item : model->named_parameters()) {
    const std::string& name = item.key();
    if (item.value().dim() != 2 || name.starts_with("embed") || name.starts_with("head") || name.ends_with("unused"))
      continue;
    ++matrices;
    Twin twin{item.value().detach().to(at::kDouble), at::zeros(item.value().sizes(), at::kDouble)};
    for (int step = 0; step < kSteps; ++step) {
      const auto gradient = made_up_gradient(name, item.value().numel(), step);
      twin.update(at::tensor(gradient).view(item.value().sizes()).to(at::kDouble) * 0.5, 0.02, 0.1, 0.95);
    }
    const auto expected = values_of(twin.param.reshape({-1}));
    for (std::size_t i = 0; i < expected.size(); ++i)
      ASSERT_NEAR(alone.at(name)[i], expected[i], 1e-5) << name << " " << i;
  }
  EXPECT_GE(matrices, 9);

  for (const MeshShape& mesh : kMeshes) {
    for (const MuonReplicas replicas : {MuonReplicas::kRepeat, MuonReplicas::kShare}) {
      if (replicas == MuonReplicas::kShare && mesh.replicate == 1) continue;
      for (const int in_flight : {0, 2}) {
        run_ranks(mesh.size(), [&](comm::World& world) {
          EXPECT_EQ(run(world, mesh, options(replicas, in_flight)).params, alone)
              << to_string(mesh) << " " << world.rank();
        });
      }
    }
  }
}

// Seven experts of 6 x 4 over two ranks, cut in the middle of the fourth, and two matrices of another shape.
TEST(MuonPlan, how_many_matrices_are_stacked_does_not_show_in_the_bits) {
  run_ranks(2, [](comm::World& world) {
    const auto groups = world.groups(layout::Mesh::shard(2));
    const std::vector<MuonParam> params = {
        {.name = "experts", .shape = {7, 6, 4}, .held = {{0, 84}, {84, 168}}},
        {.name = "a", .shape = {4, 6}, .held = {{0, 24}, {24, 24}}},
        {.name = "b", .shape = {4, 6}, .held = {{0, 3}, {3, 24}}}};
    const auto stepped = [&](const MuonMovement& movement) {
      MuonPlan plan(params, exact(), movement, groups.shard);
      std::vector<MuonPiece> pieces;
      for (const MuonParam& param : params) {
        const layout::Interval held = param.held[static_cast<std::size_t>(world.rank())];
        const at::Tensor grad = at::arange(held.begin, held.end, at::kFloat).mul_(0.7).sin_();
        pieces.push_back(
            {.param = at::ones({held.size()}), .grad = grad, .momentum = at::zeros({held.size()}), .lr = 0.1});
      }
      for (int step = 0; step < 3; ++step) plan.step(pieces);
      std::vector<std::vector<float>> values;
      for (const MuonPiece& piece : pieces) values.push_back(values_of(piece.param));
      return values;
    };
    const auto one_at_a_time = stepped({.stacked_numel = 1});
    EXPECT_EQ(stepped({.stacked_numel = 50}), one_at_a_time) << "stacks of two";
    EXPECT_EQ(stepped({}), one_at_a_time);
  });
}

TEST(Muon, two_exchanges_a_bucket_with_cut_matrices_and_none_where_matrices_stay) {
  MuonOptions all_stay = options();
  all_stay.movement.local_limit = std::numeric_limits<double>::infinity();
  for (const int ranks : {2, 4}) {
    run_ranks(ranks, [&](comm::World& world) {
      const Outcome cut_up = run(world, {1, ranks}, options());
      EXPECT_EQ(cut_up.traffic.all_to_alls, kSteps * 2 * 3);  // three layers hold its matrices
      EXPECT_EQ(cut_up.traffic.all_gathers, 0);
      EXPECT_EQ(run(world, {1, ranks}, all_stay, true).traffic.all_to_alls, 0);
    });
  }
}

// Two whole matrices of a bucket lie on rank 0, one of another on rank 1, and a third bucket has one on each.
TEST(MuonPlan, whole_matrices_move_where_their_layout_is_out_of_balance_and_no_other_bucket_hears_of_it) {
  run_ranks(2, [](comm::World& world) {
    const auto groups = world.groups(layout::Mesh::shard(2));
    std::vector<MuonParam> params;
    std::vector<MuonPiece> pieces;
    const auto add = [&](int bucket, int rank) {
      params.push_back(
          {.name = fmt::format("w{}", params.size()),
           .shape = {4, 4},
           .held = {{0, rank == 0 ? 16 : 0}, {rank == 0 ? 16 : 0, 16}},
           .bucket = bucket});
      const Index numel = rank == world.rank() ? 16 : 0;
      pieces.push_back({.param = at::ones({numel}), .grad = at::ones({numel}), .momentum = at::zeros({numel})});
    };
    add(0, 0), add(0, 0), add(1, 0), add(2, 1);
    const auto exchanges = [&](double limit) {
      MuonPlan plan(params, exact(), {.local_limit = limit}, groups.shard);
      const Index before = groups.shard.traffic().all_to_alls;
      plan.step(pieces);
      EXPECT_EQ(plan.loads()[0] + plan.loads()[1], 4 * 5 * (4 * 64 + 2 * 64));
      return std::pair(groups.shard.traffic().all_to_alls - before, plan.loads()[0] / plan.loads()[1]);
    };
    EXPECT_EQ(exchanges(std::numeric_limits<double>::infinity()), std::pair(Index{0}, 3.0));
    EXPECT_EQ(exchanges(1.25), std::pair(Index{2}, 1.0));  // one bucket, there and back
  });
}

// Pieces of plain tensors: what one rank alone has of these parameters.
std::vector<MuonPiece> pieces_of(const std::vector<at::Tensor>& params, const std::vector<at::Tensor>& grads) {
  std::vector<MuonPiece> pieces;
  for (std::size_t i = 0; i < params.size(); ++i) {
    pieces.push_back(
        {.param = params[i].view({-1}),
         .grad = grads[i].reshape({-1}),
         .momentum = at::zeros({params[i].numel()}),
         .lr = 1e-3,
         .weight_decay = 0.1});
  }
  return pieces;
}

MuonParam whole(const std::string& name, const at::Tensor& param) {
  return {.name = name, .shape = param.sizes().vec(), .held = {{0, param.numel()}}};
}

TEST(MuonPlan, one_step_by_hand) {
  const at::Tensor grad = at::tensor({1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.5F}).view({2, 3});
  const std::map<MuonScale, std::vector<float>> expected{
      {MuonScale::kOriginal, {0.100781625F, -0.200090164F, 0.299240283F, -0.000633150F, 0.499581916F, -0.400212721F}},
      {MuonScale::kMatchRmsAdamW,
       {0.100264227F, -0.200018162F, 0.299717219F, -0.000219330F, 0.499822492F, -0.400047545F}}};
  for (const auto& [scale, values] : expected) {
    const at::Tensor param = at::tensor({0.1F, -0.2F, 0.3F, 0.0F, 0.5F, -0.4F}).view({2, 3});
    auto math = exact();
    math.scale = scale;
    MuonPlan plan({whole("w", param)}, math, {}, {});
    plan.step(pieces_of({param}, {grad}));
    for (int i = 0; i < 6; ++i)
      EXPECT_NEAR(values_of(param.view({-1}))[static_cast<std::size_t>(i)], values[static_cast<std::size_t>(i)], 2e-7);
  }
}

TEST(MuonPlan, row_ranges_are_matrices_of_their_own_and_so_are_the_members_of_a_stack) {
  const at::Tensor fused = at::randn({2, 9, 5});
  const at::Tensor grad = at::randn({2, 9, 5});
  const at::Tensor together = fused.clone();
  MuonParam param = whole("qkv", together);
  param.row_ranges = {{0, 4}, {4, 6}, {6, 9}};
  MuonPlan plan({param}, exact(), {}, {});
  EXPECT_EQ(plan.matrices().size(), 6U);
  plan.step(pieces_of({together}, {grad}));
  for (int i = 0; i < 2; ++i) {
    for (const Interval& rows : param.row_ranges) {
      const at::Tensor apart = fused[i].narrow(0, rows.begin, rows.size()).clone();
      MuonPlan alone({whole("part", apart)}, exact(), {}, {});
      alone.step(pieces_of({apart}, {grad[i].narrow(0, rows.begin, rows.size()).contiguous()}));
      EXPECT_TRUE(at::equal(apart, together[i].narrow(0, rows.begin, rows.size())));
    }
  }
}

TEST(MuonPlan, zeros_only_decay_and_a_skipped_step_or_missing_gradient_changes_nothing) {
  const at::Tensor start = at::randn({4, 6});
  const at::Tensor param = start.clone();
  MuonPlan plan({whole("w", param)}, exact(), {}, {});
  auto pieces = pieces_of({param}, {at::randn({4, 6})});
  plan.step(pieces, {.skip = true});
  EXPECT_TRUE(at::equal(param, start));
  EXPECT_TRUE(at::equal(pieces[0].momentum, at::zeros({24})));
  const at::Tensor grad = pieces[0].grad;
  pieces[0].grad = at::Tensor();
  plan.step(pieces);
  EXPECT_TRUE(at::equal(param, start));
  pieces[0].grad = at::zeros_like(grad);
  plan.step(pieces);
  EXPECT_TRUE(at::equal(param, start * static_cast<float>(1.0 - 1e-3 * 0.1)));
}

TEST(MuonPlan, bytes_on_the_wire_are_those_of_cut_pieces_twice_in_bf16) {
  constexpr int kRanks = 4;
  std::vector<Index> sent(kRanks, 0);
  Index elements = 0;
  run_ranks(kRanks, [&](comm::World& world) {
    std::vector<MuonParam> params;
    std::vector<MuonPiece> pieces;
    for (int i = 0; i < 8; ++i) {
      MuonParam param{.name = fmt::format("w{}", i), .shape = {32, 16}, .bucket = i / 4};
      for (int rank = 0; rank < kRanks; ++rank) param.held.push_back({rank * 128, (rank + 1) * 128});
      params.push_back(param);
      pieces.push_back({.param = at::ones({128}), .grad = at::ones({128}), .momentum = at::zeros({128})});
    }
    const auto groups = world.groups(layout::Mesh::shard(kRanks));
    MuonPlan plan(params, {}, {}, groups.shard);
    const Index before = groups.shard.traffic().all_to_all_bytes;
    plan.step(pieces);
    sent[static_cast<std::size_t>(world.rank())] = groups.shard.traffic().all_to_all_bytes - before;
    if (world.rank() == 0) elements = 8 * 512;
  });
  const double mean = static_cast<double>(sent[0] + sent[1] + sent[2] + sent[3]) / kRanks;
  const double local_share = 1.0 / kRanks;  // the root's own piece
  EXPECT_LE(mean, 1.02 * 2.0 * (static_cast<double>(elements) / kRanks) * 2.0 * (1.0 - local_share));
  EXPECT_GT(mean, 0.0);
}

// Two replicas of two ranks: what one computes for the other crosses once, and nothing goes to itself.
TEST(MuonPlan, replicas_that_share_send_each_update_once) {
  run_ranks(4, [](comm::World& world) {
    const auto groups = world.groups(MeshShape{2, 2}.mesh());
    std::vector<MuonParam> params;
    std::vector<MuonPiece> pieces;
    for (int i = 0; i < 4; ++i) {
      params.push_back({.name = fmt::format("w{}", i), .shape = {8, 8}, .held = {{0, 32}, {32, 64}}});
      pieces.push_back({.param = at::ones({32}), .grad = at::ones({32}), .momentum = at::zeros({32})});
    }
    MuonPlan plan(params, exact(), {.replicas = MuonReplicas::kShare}, groups.shard, groups.replicate);
    const auto before = groups.replicate.traffic();
    plan.step(pieces);
    EXPECT_EQ(groups.replicate.traffic().all_to_alls - before.all_to_alls, 1);
    EXPECT_EQ(groups.replicate.traffic().all_to_all_bytes - before.all_to_all_bytes, 2 * 32 * 4);
  });
}

// Rank 1 leaves a gradient out. Without the check its rows of w1 count as zeros; with it nobody moves.
TEST(MuonPlan, ranks_that_disagree_on_missing_gradients_are_told_so_under_check) {
  for (const MeshShape mesh : {MeshShape{1, 3}, MeshShape{2, 2}}) {
    comm::WorldOptions options = quick();
    options.comm.check_order = true;
    run_ranks(
        mesh.size(),
        [&](comm::World& world) {
          const auto groups = world.groups(mesh.mesh());
          const int ranks = mesh.shard;
          std::vector<MuonParam> params;
          std::vector<MuonPiece> pieces;
          for (int i = 0; i < 3; ++i) {
            MuonParam param{.name = fmt::format("w{}", i), .shape = {ranks, 4}};
            for (int rank = 0; rank < ranks; ++rank) param.held.push_back({rank * 4, (rank + 1) * 4});
            params.push_back(param);
            pieces.push_back({.param = at::ones({4}), .grad = at::ones({4}), .momentum = at::zeros({4})});
          }
          MuonPlan plan(params, exact(), {}, groups.shard, groups.replicate);
          if (world.rank() == 1) pieces[1].grad = at::Tensor();
          const Index before = groups.shard.traffic().all_to_all_bytes;
          EXPECT_INVALID(plan.step(pieces), "ranks 1 of ");
          EXPECT_INVALID(plan.step(pieces), "'w1'");
          const Index flags = 2 * 3 * (ranks - 1);  // two tries
          EXPECT_EQ(groups.shard.traffic().all_to_all_bytes - before, flags);
          for (const MuonPiece& piece : pieces) EXPECT_TRUE(at::equal(piece.param, at::ones({4})));
          pieces[1].grad = at::zeros({4});
          plan.step(pieces);
          for (MuonPiece& piece : pieces) piece.grad = at::Tensor();
          plan.step(pieces);
        },
        options);
  }
}

TEST(MuonPlan, refuses_what_it_cannot_do_before_anything_travels) {
  const at::Tensor vector = at::zeros({5});
  EXPECT_INVALID(MuonPlan({whole("a_norm", vector)}, {}, {}, {}), "a_norm");
  const MuonParam gap{.name = "w", .shape = {4, 4}, .held = {{0, 12}}};
  EXPECT_INVALID(MuonPlan({gap}, {}, {}, {}), "all 16 elements");
  const MuonParam ranges{.name = "w", .shape = {4, 4}, .held = {{0, 16}}, .row_ranges = {{0, 3}}};
  EXPECT_INVALID(MuonPlan({ranges}, {}, {}, {}), "all 4 rows");
  EXPECT_INVALID(optim::muon_scale("rms"), "match_rms_adamw");
}

TEST(Muon, refuses_a_vector_that_a_policy_sends_to_it) {
  run_ranks(2, [](comm::World& world) {
    Tree tree = make_tree(world, {1, 2});
    MuonOptions all = options();
    all.policy = [](const buffer::ShardedTensor&) { return optim::ParamSettings{}; };
    EXPECT_INVALID(Muon(tree.root, all), "two and more dims");
  });
}

}  // namespace
}  // namespace ragged::test
