// SOAP over trees and over plain pieces: against its twin, bit for bit across worlds, what lies where and what travels.
#include "ragged/optim/soap.h"

#include <mutex>
#include <set>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ragged/optim/adamw_step.h"
#include "ragged/optim/make_optimizer.h"
#include "tests/optim/soap_twin.h"
#include "tests/optim/training.h"
#include "tests/support/expect_error.h"

namespace ragged::test {
namespace {

using layout::Interval;
using optim::MatrixParam;
using optim::Soap;
using optim::SoapMath;
using optim::SoapOptions;
using optim::SoapPiece;
using optim::SoapPlan;
using optim::SoapState;

const std::vector<MeshShape> kMeshes{{1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 7}, {2, 2}};
constexpr int kSteps = 5;
constexpr double kLr = 0.02;
constexpr double kDecay = 0.1;

SoapOptions options(int in_flight = 2) {
  return {
      .lr = kLr,
      .weight_decay = kDecay,
      .math = {.precondition_frequency = 2},
      .movement = {.buckets_in_flight = in_flight}};
}

using Values = std::map<std::string, std::vector<float>>;

// Whole tensors by name, put together by all ranks: those who hold nothing add nothing.
class Gathered {
 public:
  void add(const buffer::ShardedTensor& tensor) {
    const std::lock_guard lock(mutex_);
    std::vector<float>& whole = values_[tensor.name];
    whole.resize(static_cast<std::size_t>(numel_of(tensor)));
    std::ranges::copy(values_of(tensor.local), whole.begin() + tensor.owned.begin);
    holders_[tensor.name] += tensor.owned.empty() ? 0 : 1;
  }
  const Values& values() const { return values_; }
  const std::map<std::string, int>& holders() const { return holders_; }

 private:
  std::mutex mutex_;
  Values values_;
  std::map<std::string, int> holders_;
};

// One step of a tree with gradients that don't depend on the layout.
void step(Tree& tree, optim::Optimizer& optimizer, int rank, int number) {
  backward(tree, rank, number);
  make_up_gradients(*tree.root, number);
  optimizer.step({.grad = 0.5});
  tree.root->zero_grad();
}

struct Outcome {
  Gathered params, states;
  comm::Traffic traffic{};  // of rank 0
  std::mutex mutex;
  Index bytes = 0;  // of all ranks
};

void run(const MeshShape& mesh, const SoapOptions& given, Outcome& outcome, bool whole_tensors = false) {
  run_ranks(mesh.size(), [&](comm::World& world) {
    Tree tree = make_tree(world, mesh, whole_tensors);
    Soap soap(tree.root, given);
    comm::Traffic in_steps;
    for (int number = 0; number < kSteps; ++number) {
      backward(tree, world.rank(), number);
      make_up_gradients(*tree.root, number);
      const comm::Traffic start = tree.root->groups().shard.traffic();
      soap.step({.grad = 0.5});
      const comm::Traffic end = tree.root->groups().shard.traffic();
      in_steps.all_to_alls += end.all_to_alls - start.all_to_alls;
      in_steps.all_to_all_bytes += end.all_to_all_bytes - start.all_to_all_bytes;
      in_steps.all_gathers += end.all_gathers - start.all_gathers;
      tree.root->zero_grad();
    }
    for (const auto& param : tree.root->sharded_parameters()) outcome.params.add(param);
    for (const auto& state : soap.states()) outcome.states.add(state);
    const std::lock_guard lock(outcome.mutex);
    if (world.rank() == 0) outcome.traffic = in_steps;
    outcome.bytes += in_steps.all_to_all_bytes;
  });
}

TEST(Soap, one_rank_follows_the_twin) {
  run_ranks(1, [](comm::World& world) {
    Tree tree = make_tree(world, {1, 1});
    Soap soap(tree.root, options());
    std::map<std::string, SoapTwin> twins;
    for (const MatrixParam& param : soap.plan().params()) {
      const auto [twin, is_new] = twins.emplace(param.name, SoapTwin(tree.root->full_parameter(param.name)));
      twin->second.frequency = 2;
    }
    EXPECT_EQ(twins.size(), 15U);  // five hidden matrices a layer
    for (int number = 0; number < kSteps; ++number) {
      step(tree, soap, 0, number);
      for (std::size_t i = 0; i < soap.plan().matrices().size(); ++i) {
        const MatrixParam& param = soap.plan().params().at(i);  // a matrix each
        if (param.name.ends_with("unused")) continue;           // never has a gradient
        SoapTwin& twin = twins.at(param.name);
        const auto grad = made_up_gradient(param.name, twin.param.numel(), number);
        const SoapState& state = soap.matrix_states()[i];
        twin.step(at::tensor(grad).view(twin.param.sizes()) * 0.5, kLr, kDecay, state.left_basis, state.right_basis);
        const at::Tensor gap = tree.root->full_parameter(param.name).to(at::kDouble) - twin.param;
        ASSERT_LT(gap.abs().max().item<double>(), 2e-5) << param.name << " step " << number;
        ASSERT_LT((state.exp_avg_sq - twin.V).abs().max().item<double>(), 1e-6) << param.name;
      }
    }
  });
}

TEST(Soap, every_world_gives_the_bits_of_one_rank_states_included) {
  Outcome alone;
  run({1, 1}, options(), alone);
  for (const MeshShape& mesh : kMeshes) {
    for (const int in_flight : {0, 2}) {
      for (const bool whole_tensors : {false, true}) {
        SCOPED_TRACE(to_string(mesh) + (whole_tensors ? ", whole" : ", cut"));
        Outcome outcome;
        run(mesh, options(in_flight), outcome, whole_tensors);
        EXPECT_EQ(outcome.params.values(), alone.params.values());
        EXPECT_EQ(outcome.states.values(), alone.states.values());
        for (const auto& [name, holders] : outcome.states.holders()) EXPECT_EQ(holders, mesh.replicate) << name;
      }
    }
  }
}

TEST(Soap, bits_in_bf16_on_the_wire_are_those_of_one_rank_too) {
  SoapOptions bf16 = options();
  bf16.math.wire_dtype = at::kBFloat16;
  Outcome exact;
  Outcome alone;
  Outcome cut;
  run({1, 1}, options(), exact);
  run({1, 1}, bf16, alone);
  run({1, 3}, bf16, cut);
  EXPECT_EQ(cut.params.values(), alone.params.values());
  EXPECT_EQ(cut.states.values(), alone.states.values());
  EXPECT_NE(exact.params.values(), alone.params.values());
}

TEST(Soap, two_exchanges_a_bucket_with_cut_matrices_and_none_where_matrices_are_whole) {
  for (const int ranks : {2, 4}) {
    Outcome cut;
    run({1, ranks}, options(), cut);
    EXPECT_EQ(cut.traffic.all_to_alls, kSteps * 2 * 3);  // three layers hold its matrices
    EXPECT_EQ(cut.traffic.all_gathers, 0);
    SoapOptions stay = options();
    stay.movement.local_limit = std::numeric_limits<double>::infinity();
    Outcome whole;
    run({1, ranks}, stay, whole, true);
    EXPECT_EQ(whole.traffic.all_to_alls, 0);
    EXPECT_EQ(whole.bytes, 0);
  }
}

// Pieces of plain tensors: what one rank alone has of these parameters.
std::vector<SoapPiece> pieces_of(
    const std::vector<at::Tensor>& params, const std::vector<at::Tensor>& grads, std::int64_t number) {
  std::vector<SoapPiece> pieces;
  for (std::size_t i = 0; i < params.size(); ++i) {
    pieces.push_back(
        {.param = params[i].view({-1}),
         .grad = grads[i].defined() ? grads[i].reshape({-1}) : at::Tensor(),
         .lr = kLr,
         .weight_decay = kDecay,
         .step = number});
  }
  return pieces;
}

MatrixParam whole(const std::string& name, const at::Tensor& param) {
  return {.name = name, .shape = param.sizes().vec(), .held = {{0, param.numel()}}};
}

constexpr SoapMath kOften{.precondition_frequency = 2};

TEST(SoapPlan, bytes_on_the_wire_are_those_of_what_changes_ranks_twice) {
  constexpr int kRanks = 4;
  for (const at::ScalarType wire : {at::kFloat, at::kBFloat16}) {
    std::vector<Index> sent(kRanks, 0);
    std::vector<Index> moved(kRanks, 0);
    run_ranks(kRanks, [&](comm::World& world) {
      const auto rank = static_cast<std::size_t>(world.rank());
      std::vector<MatrixParam> params;
      std::vector<SoapPiece> pieces;
      const std::vector<Index> cuts{0, 17, 17, 101, 143};  // 13 x 11, cut anywhere; rank 1 holds nothing
      for (int i = 0; i < 6; ++i) {
        MatrixParam param{.name = fmt::format("w{}", i), .shape = {13, 11}, .bucket = i / 3};
        for (std::size_t r = 0; r < kRanks; ++r) param.held.push_back({cuts[r], cuts[r + 1]});
        const Index numel = param.held[rank].size();
        params.push_back(param);
        pieces.push_back({.param = at::ones({numel}), .grad = at::ones({numel})});
      }
      const auto groups = world.groups(layout::Mesh::shard(kRanks));
      SoapMath math = kOften;
      math.wire_dtype = wire;
      SoapPlan plan(params, math, {}, groups.shard);
      const auto states = plan.make_states(at::TensorOptions());
      const Index before = groups.shard.traffic().all_to_all_bytes;
      plan.step(pieces, states);
      sent[rank] = groups.shard.traffic().all_to_all_bytes - before;
      for (const optim::ParamMatrix& m : plan.matrices()) {
        const Index mine = cuts[rank + 1] - cuts[rank];
        if (m.root == world.rank()) {
          moved[rank] += 143 - mine;  // the others' updates
        } else {
          moved[rank] += mine;  // its gradient
        }
      }
    });
    const Index item = wire == at::kFloat ? 4 : 2;
    for (std::size_t r = 0; r < kRanks; ++r) EXPECT_EQ(sent[r], item * moved[r]) << r;
  }
}

TEST(SoapPlan, row_ranges_are_matrices_of_their_own_and_so_are_the_members_of_a_stack) {
  at::manual_seed(4);
  const at::Tensor fused = at::randn({2, 9, 5});
  const at::Tensor together = fused.clone();
  MatrixParam param = whole("qkv", together);
  param.row_ranges = {{0, 4}, {4, 6}, {6, 9}};
  SoapPlan plan({param}, kOften, {}, {});
  const auto states = plan.make_states(at::TensorOptions());
  ASSERT_EQ(plan.matrices().size(), 6U);
  std::vector<at::Tensor> grads;
  for (int number = 1; number <= 4; ++number) {
    grads.push_back(at::randn({2, 9, 5}));
    plan.step(pieces_of({together}, {grads.back()}, number), states);
  }
  for (int i = 0; i < 2; ++i) {
    for (const Interval& rows : param.row_ranges) {
      const auto part = [&](const at::Tensor& of) { return of[i].narrow(0, rows.begin, rows.size()); };
      const at::Tensor apart = part(fused).clone();
      SoapPlan alone({whole("part", apart)}, kOften, {}, {});
      const auto own = alone.make_states(at::TensorOptions());
      for (int number = 1; number <= 4; ++number)
        alone.step(pieces_of({apart}, {part(grads[static_cast<std::size_t>(number) - 1])}, number), own);
      EXPECT_TRUE(at::equal(apart, part(together)));
    }
  }
}

TEST(SoapPlan, without_a_basis_on_either_side_it_is_adamw) {
  at::manual_seed(5);
  const at::Tensor ours = at::randn({7, 13});
  const at::Tensor theirs = ours.clone().view({-1});
  SoapPlan plan({whole("w", ours)}, {.max_precondition_dim = 6}, {}, {});
  const auto states = plan.make_states(at::TensorOptions());
  EXPECT_FALSE(states[0].left.defined() || states[0].right.defined());
  const at::Tensor exp_avg = at::zeros({91});
  const at::Tensor exp_avg_sq = at::zeros({91});
  for (int number = 1; number <= 20; ++number) {
    const at::Tensor grad = at::randn({7, 13});
    plan.step(pieces_of({ours}, {grad}, number), states, {.grad = 0.3});
    const optim::AdamWPiece piece{
        .param = theirs,
        .grad = grad.view({-1}),
        .exp_avg = exp_avg,
        .exp_avg_sq = exp_avg_sq,
        .step = optim::adamw_constants(
            {.lr = kLr, .beta1 = 0.95, .beta2 = 0.95, .eps = 1e-8, .weight_decay = kDecay}, number)};
    optim::adamw_step(std::vector{piece}, {.grad = 0.3});
    ASSERT_LT((ours.view({-1}) - theirs).abs().max().item<double>(), 1e-6) << number;  // at::sqrt rounds its own way
    ASSERT_TRUE(at::equal(states[0].exp_avg.view({-1}), exp_avg));
    ASSERT_TRUE(at::equal(states[0].exp_avg_sq.view({-1}), exp_avg_sq));
  }
}

TEST(SoapPlan, betas_and_frequency_of_the_steps_to_come_are_those_of_a_plan_made_with_them) {
  const at::Tensor first = at::randn({7, 13});
  const at::Tensor second = first.clone();
  const SoapMath later{.beta1 = 0.8, .beta2 = 0.9, .eps = 1e-6, .precondition_frequency = 2};
  SoapPlan changed({whole("w", first)}, {}, {}, {});
  SoapPlan made({whole("w", second)}, later, {}, {});
  changed.set_math(later);
  const auto states = changed.make_states(at::TensorOptions());
  const auto others = made.make_states(at::TensorOptions());
  for (int number = 1; number <= 6; ++number) {
    const at::Tensor grad = at::randn({7, 13});
    changed.step(pieces_of({first}, {grad}, number), states);
    made.step(pieces_of({second}, {grad}, number), others);
  }
  EXPECT_TRUE(at::equal(first, second));
  EXPECT_TRUE(at::equal(states[0].left_basis, others[0].left_basis));
  EXPECT_INVALID(changed.set_math({.beta1 = 1.0}), "beta1 in [0, 1)");
  EXPECT_INVALID(changed.set_math({.max_precondition_dim = 8}), "Make another plan");
}

TEST(SoapPlan, zeros_only_decay_and_a_skipped_step_or_missing_gradient_changes_nothing) {
  const at::Tensor start = at::randn({4, 6});
  const at::Tensor param = start.clone();
  SoapPlan plan({whole("w", param)}, kOften, {}, {});
  const auto states = plan.make_states(at::TensorOptions());
  plan.step(pieces_of({param}, {at::randn({4, 6})}, 1), states, {.skip = true});
  plan.step(pieces_of({param}, {at::Tensor()}, 1), states);
  EXPECT_TRUE(at::equal(param, start));
  EXPECT_FALSE(states[0].left.any().item<bool>());
  for (int number = 1; number <= 3; ++number) {
    const at::Tensor expected = param * static_cast<float>(1.0 - kLr * kDecay);
    plan.step(pieces_of({param}, {at::zeros({4, 6})}, number), states);
    EXPECT_TRUE(at::equal(param, expected));
  }
}

TEST(SoapPlan, infinite_gradients_reach_the_parameters_unless_the_step_is_skipped) {
  const at::Tensor param = at::randn({4, 6});
  SoapPlan plan({whole("w", param)}, {.precondition_frequency = 1}, {}, {});
  const auto states = plan.make_states(at::TensorOptions());
  for (int number = 1; number <= 3; ++number) plan.step(pieces_of({param}, {at::randn({4, 6})}, number), states);
  const at::Tensor before = param.clone();
  const at::Tensor bad = at::full({4, 6}, std::numeric_limits<float>::infinity());
  plan.step(pieces_of({param}, {bad}, 4), states, {.skip = true});
  EXPECT_TRUE(at::equal(param, before));
  EXPECT_TRUE(states[0].left.isfinite().all().item<bool>());
  plan.step(pieces_of({param}, {bad}, 4), states);
  EXPECT_FALSE(param.isfinite().any().item<bool>());
}

// Many layers on few ranks: the largest share of all states is within what the note promises, and so is that of time.
TEST(SoapPlan, neither_memory_nor_time_piles_up_on_a_rank) {
  for (const int ranks : {4, 7, 16}) {
    std::vector<MatrixParam> params;
    for (int layer = 0; layer < 24; ++layer) {
      for (const auto& [rows, cols] : {std::pair<Index, Index>{1024, 1024}, {256, 1024}, {2816, 1024}, {1024, 2816}}) {
        MatrixParam param{.name = "w", .shape = {rows, cols}, .bucket = layer};
        const Index part = ceil_div(rows * cols, ranks);
        for (int r = 0; r < ranks; ++r)
          param.held.push_back({std::min(rows * cols, r * part), std::min(rows * cols, (r + 1) * part)});
        params.push_back(param);
      }
    }
    const SoapMath math;
    const optim::SoapLayout layout = optim::soap_layout(params, math, 1.25, ranks);
    std::vector<double> memory(static_cast<std::size_t>(ranks), 0.0);
    std::vector<double> time = memory;
    for (int r = 0; r < ranks; ++r)
      memory[static_cast<std::size_t>(r)] = static_cast<double>(optim::soap_state_numel(layout.matrices, math, r));
    for (const optim::ParamMatrix& m : layout.matrices)
      time[static_cast<std::size_t>(m.root)] += optim::soap_cost(m.rows, m.cols, {}, math.precondition_frequency);
    for (const std::vector<double>& load : {memory, time}) {
      double sum = 0.0;
      for (const double value : load) sum += value;
      EXPECT_LT(*std::ranges::max_element(load) * ranks / sum, 1.3) << ranks;
    }
  }
}

TEST(Soap, table_says_the_bytes_of_this_ranks_states_and_names_are_by_matrix) {
  Index all = 0;
  std::mutex mutex;
  run_ranks(3, [&](comm::World& world) {
    Tree tree = make_tree(world, {1, 3});
    SoapOptions one_sided = options();
    one_sided.math.max_precondition_dim = 12;  // `up` is 19 x 12, `down` 12 x 19, `qkv` 36 x 12
    one_sided.row_ranges = [](const buffer::ShardedTensor& param) {
      return param.name == "layer0.qkv" ? optim::ranges_of_rows(std::vector<Index>{12, 24}) : std::vector<Interval>{};
    };
    const Soap soap(tree.root, one_sided);
    Index in_rows = 0;
    for (const optim::OptimizerRow& row : soap.table()) {
      EXPECT_EQ(row.optimizer, "soap");
      EXPECT_EQ(row.state_format, "fp32");
      in_rows += row.state_bytes;
    }
    Index in_tensors = 0;
    std::set<std::string> names;
    for (const auto& state : soap.states()) {
      in_tensors += static_cast<Index>(state.local.nbytes());
      names.insert(state.name);
    }
    EXPECT_EQ(in_rows, in_tensors);
    for (const char* name : {"layer0.qkv.0.L", "layer0.qkv.1.Q_R", "layer1.qkv.R", "layer1.out.Q_L"})
      EXPECT_TRUE(names.contains(name)) << name;
    for (const char* name : {"layer0.qkv.1.L", "layer1.qkv.L", "layer1.up.Q_L", "layer1.down.R", "embed.L"})
      EXPECT_FALSE(names.contains(name)) << name;
    const std::lock_guard lock(mutex);
    all += in_tensors;
  });
  const Index qkv = 2 * 36 * 12 + 2 * 12 * 12;
  const Index out = 2 * 12 * 12 + 4 * 12 * 12;
  const Index up_and_down = 2 * (2 * 19 * 12 + 2 * 12 * 12);
  const Index unused = 2 * 5 * 3 + 2 * 5 * 5 + 2 * 3 * 3;
  const Index split = 2 * 36 * 12 + 4 * 12 * 12 + 2 * 12 * 12;
  EXPECT_EQ(all, 4 * (split + 2 * qkv + 3 * (out + up_and_down + unused)));
}

TEST(Soap, refuses_what_it_cannot_do_before_anything_travels) {
  const at::Tensor param = at::zeros({4, 4});
  EXPECT_INVALID(SoapPlan({whole("a_norm", at::zeros({5}))}, {}, {}, {}), "[soap] Expected parameters of two");
  EXPECT_INVALID(SoapPlan({whole("w", param)}, {.precondition_frequency = 0}, {}, {}), "precondition_frequency >= 1");
  EXPECT_INVALID(SoapPlan({whole("w", param)}, {.max_precondition_dim = -1}, {}, {}), "max_precondition_dim >= 0");
  EXPECT_INVALID(SoapPlan({whole("w", param)}, {.wire_dtype = at::kHalf}, {}, {}), "fp32 or bf16");
  EXPECT_INVALID(SoapPlan({whole("w", param)}, {.beta2 = 1.0}, {}, {}), "[soap]");
  EXPECT_INVALID(SoapPlan({whole("w", param)}, {}, {.buckets_in_flight = -1}, {}), "buckets_in_flight");
  SoapPlan plan({whole("w", param)}, {}, {}, {});
  EXPECT_INVALID(plan.step({}, {}), "a piece for each of 1");
  run_ranks(2, [](comm::World& world) {
    Tree tree = make_tree(world, {1, 2});
    SoapOptions bf16 = options();
    bf16.policy = [](const buffer::ShardedTensor& tensor) {
      return optim::ParamSettings{.takes = tensor.shape.size() >= 2, .state_format = "bf16"};
    };
    EXPECT_INVALID(Soap(tree.root, bf16), "Expected states in fp32");
    world.all().barrier();
  });
}

TEST(MakeOptimizer, soap_takes_hidden_matrices_and_adamw_the_rest) {
  run_ranks(2, [](comm::World& world) {
    Tree tree = make_tree(world, {1, 2});
    optim::OptimizerSpec spec{.kind = "soap"};
    spec.rules = {{.match = "embed|head", .kind = "adamw"}};
    const auto optimizer = optim::make_optimizer(tree.root, spec);
    for (const optim::OptimizerRow& row : optimizer->table()) {
      const bool hidden = row.shape.size() >= 2 && row.name.starts_with("layer") && !row.name.ends_with("bias");
      EXPECT_EQ(row.optimizer, hidden ? "soap" : "adamw") << row.name;
    }
    for (int number = 0; number < 2; ++number) step(tree, *optimizer, world.rank(), number);
    EXPECT_THAT(optimizer->steps(), ::testing::Contains(2));
  });
}

double last_twenty(const TextRun& run) {
  double sum = 0.0;
  for (std::size_t i = run.losses.size() - 20; i < run.losses.size(); ++i) sum += run.losses[i];
  return sum / 20.0;
}

// Each at the better of two rates, so that it isn't the rate.
TEST(SoapTraining, learns_more_than_adamw_in_as_many_steps) {
  run_ranks(
      1,
      [](comm::World& world) {
        double adamw = 100.0;
        double soap = 100.0;
        for (const double lr : {1e-3, 3e-3}) {
          const TextTraining training{.steps = 300, .lr = lr};
          const auto with = [&](const char* kind) {
            return last_twenty(train_on_text(world, training, [&](std::shared_ptr<fsdp::Unit> root) {
              optim::OptimizerSpec spec{.kind = kind};
              spec.rules = {{.match = "embed|head", .kind = "adamw"}};
              spec.adamw = {.beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.1};
              spec.soap = {.weight_decay = 0.1};
              return optim::make_optimizer(root, spec);
            }));
          };
          const double one = with("adamw");
          const double other = with("soap");
          ::testing::Test::RecordProperty(fmt::format("rate {}", lr), fmt::format("{} {}", one, other));
          adamw = std::min(adamw, one);
          soap = std::min(soap, other);
        }
        EXPECT_LT(soap, adamw - 0.05);
      },
      quick(60));
}

}  // namespace
}  // namespace ragged::test
