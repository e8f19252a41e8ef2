// The training loop over ranks as threads: the numbers it reports don't depend on how the work is dealt out.
#include "ragged/train/trainer.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "tests/support/ranks.h"
#include "tests/train/text.h"

namespace ragged::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

TextData some_text() {
  std::string text;
  for (int i = 0; i < 400; ++i) text += "for i in range(" + std::to_string(i * i % 97) + "):\n    print(i)\n";
  return text_in_memory(text, 12345);
}

struct Outcome {
  std::vector<Json> steps;
  Json summary;
  double loss(std::size_t step) const { return steps.at(step)["loss"]; }
};

class Trainer : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::temp_directory_path() / ("ragged_" + std::to_string(getpid()) + "_" + test->name());
    config_.model = {.dim = 24, .layers = 2, .heads = 6, .kv_heads = 2, .feed_forward = 20};
    config_.train.steps = 3;
    config_.train.batch = 4;
    config_.train.sequence = 16;
    config_.train.warmup = 1;
    config_.train.param_dtype = "fp32";
    config_.eval.sequences = 7;  // doesn't divide by any number of ranks
    config_.eval.sample_bytes = 0;
    config_.run.dir = folder_.string();
    config_.run.device = "cpu";
  }
  void TearDown() override { fs::remove_all(folder_); }

  // Trains on that many ranks and reads back what was written.
  Outcome run(int world_size, const Config& config) const {
    test::run_ranks(
        world_size, [&](comm::World& world) { train(config, world, some_text()); }, test::quick(60));
    Outcome result;
    std::ifstream lines(fs::path(config.run.dir) / "metrics.jsonl");
    for (std::string line; std::getline(lines, line);) result.steps.push_back(Json::parse(line));
    result.summary = Json::parse(std::ifstream(fs::path(config.run.dir) / "summary.json"));
    EXPECT_EQ(result.steps.size(), static_cast<std::size_t>(config.train.steps));
    EXPECT_EQ(result.summary["planned"], result.summary["measured"]) << world_size << " ranks";
    return result;
  }

  // The global batch of config_, on more ranks.
  Config shared_by(int ranks) const {
    Config config = config_;
    config.train.batch = config_.train.batch / ranks;
    return config;
  }

  static void expect_equal(const Outcome& a, const Outcome& b, double relative, const std::string& what) {
    for (std::size_t step = 0; step < a.steps.size(); ++step) {
      for (const char* field : {"loss", "grad_norm"}) {
        const double expected = a.steps[step][field];
        EXPECT_NEAR(b.steps[step][field].get<double>(), expected, relative * expected)
            << what << ", " << field << " of step " << step + 1;
      }
    }
    const double expected = a.summary["val_loss"];
    EXPECT_NEAR(b.summary["val_loss"].get<double>(), expected, relative * expected) << what;
  }

  fs::path folder_;
  Config config_;
};

TEST_F(Trainer, equal_global_batches_give_equal_runs_on_any_number_of_ranks) {
  const Outcome one = run(1, config_);
  EXPECT_NEAR(one.loss(0), 5.545, 0.1);  // ln 256: nothing is known yet
  for (int ranks : {2, 4}) expect_equal(one, run(ranks, shared_by(ranks)), 2e-5, std::to_string(ranks) + " ranks");
}

TEST_F(Trainer, experts_train_alike_on_any_number_of_ranks) {
  config_.model.kind = "moe";
  config_.model.feed_forward = 12;
  config_.model.experts = 5;
  const Outcome one = run(1, config_);
  for (int ranks : {2, 4}) expect_equal(one, run(ranks, shared_by(ranks)), 2e-5, std::to_string(ranks) + " ranks");
  Config config = shared_by(2);
  config.train.activation_checkpointing = true;
  config.model.balance_loss = 0.01;
  const Outcome recomputed = run(2, config);
  config.train.activation_checkpointing = false;
  expect_equal(run(2, config), recomputed, 2e-5, "recomputed, with the balance loss");
  EXPECT_NE(recomputed.loss(0), one.loss(0));
}

TEST_F(Trainer, tied_embeddings_and_experts_without_biases_train_alike_on_any_number_of_ranks) {
  config_.model.tied_embeddings = true;
  config_.model.head_dim = 6;
  for (const bool has_experts : {false, true}) {
    config_.model.kind = has_experts ? "moe" : "llama";
    config_.model.expert_biases = !has_experts;
    const Outcome one = run(1, config_);
    EXPECT_LT(one.loss(2), one.loss(0));
    for (int ranks : {2, 4}) expect_equal(one, run(ranks, shared_by(ranks)), 2e-5, std::to_string(ranks) + " ranks");
  }
}

TEST_F(Trainer, accumulation_gives_the_run_of_the_larger_batch) {
  const Outcome whole = run(2, shared_by(2));
  Config config = shared_by(4);
  config.train.accumulate = 2;
  expect_equal(whole, run(2, config), 2e-5, "reduced once");
  config.train.sync_each_micro_batch = true;
  expect_equal(whole, run(2, config), 2e-5, "reduced each time");
}

TEST_F(Trainer, replicas_prefetch_and_recomputation_change_nothing) {
  const Outcome plain = run(4, shared_by(4));
  Config config = shared_by(4);
  config.parallel.replicate = 2;
  expect_equal(plain, run(4, config), 2e-5, "2 x 2");
  config = shared_by(4);
  config.train.activation_checkpointing = true;
  expect_equal(plain, run(4, config), 2e-5, "recomputed");
  config = shared_by(4);
  config.parallel.reshard_after_forward = false;
  config.parallel.forward_prefetch = 1;
  config.parallel.rows = 4;
  expect_equal(plain, run(4, config), 2e-5, "kept, prefetched, cut by rows");
  config = shared_by(4);
  config.parallel.collectives = "stock";
  expect_equal(plain, run(4, config), 2e-5, "stock");
}

TEST_F(Trainer, bf16_runs_close_to_fp32) {
  const Outcome exact = run(2, shared_by(2));
  Config config = shared_by(2);
  config.train.param_dtype = "bf16";
  expect_equal(exact, run(2, config), 0.05, "bf16");
}

TEST_F(Trainer, loss_falls) {
  config_.train.steps = 40;
  config_.train.lr = 1e-2;
  const Outcome result = run(1, config_);
  EXPECT_LT(result.summary["val_loss"], 3.0);
}

TEST_F(Trainer, validates_after_the_first_step_when_due_and_after_the_last) {
  config_.train.steps = 5;
  config_.eval.every = 2;
  const Outcome result = run(1, config_);
  std::vector<int> validated;
  for (const Json& step : result.steps) {
    if (step.contains("val_loss")) validated.push_back(step["step"]);
  }
  EXPECT_EQ(validated, (std::vector<int>{1, 2, 4, 5}));
  EXPECT_EQ(result.summary["val_loss"], result.steps.back()["val_loss"]);
}

TEST_F(Trainer, resolved_config_repeats_the_run) {
  const Outcome first = run(2, shared_by(2));
  Config again = load_config(folder_ / "config.toml");
  EXPECT_EQ(to_toml(again), to_toml(shared_by(2)));
  again.run.dir = (folder_ / "again").string();
  const Outcome second = run(2, again);
  for (std::size_t step = 0; step < 3; ++step) EXPECT_EQ(first.loss(step), second.loss(step));
}

TEST_F(Trainer, sample_is_written_by_all_ranks_together) {
  config_.eval.sample_bytes = 20;  // beyond the context of 16
  run(2, config_);
}

TEST_F(Trainer, loss_that_is_not_finite_stops_the_run_and_says_what_to_look_at) {
  config_.train.lr = 1e30;
  try {
    run(2, config_);
    FAIL();
  } catch (const InvalidArgument&) {
    FAIL() << "a failure of the run, not of the call";
  } catch (const Error& error) {
    const std::string text = error.what();
    for (const char* fragment : {"finite loss", "step 2", "train.lr", "metrics.jsonl"}) {
      EXPECT_NE(text.find(fragment), std::string::npos) << text;
    }
  }
}

TEST_F(Trainer, steps_that_are_not_finite_are_skipped_and_counted_where_asked) {
  config_.train.lr = 1e30;  // the first step ruins the model
  config_.train.steps = 4;
  config_.train.nonfinite = "skip";
  for (const std::string_view kind : optim::optimizer_kinds()) {
    SCOPED_TRACE(kind);
    config_.optimizer.kind = kind;
    const Outcome result = run(2, config_);
    EXPECT_EQ(result.summary["skipped_steps"], 3);
    std::vector<int> skipped;
    for (const Json& step : result.steps) skipped.push_back(step["skipped"]);
    EXPECT_EQ(skipped, (std::vector<int>{0, 1, 2, 3}));
    EXPECT_TRUE(result.steps.back()["grad_norm"].is_null());
    // Nothing changed after the first step.
    EXPECT_EQ(result.steps[0]["val_loss"], result.summary["val_loss"]);
  }
}

TEST_F(Trainer, eight_bit_moments_train_alike_on_any_number_of_ranks_and_take_less_memory) {
  config_.model = {.dim = 72, .layers = 2, .heads = 6, .kv_heads = 2, .feed_forward = 100};
  config_.train.steps = 4;
  const Outcome exact = run(1, config_);
  config_.optimizer.kind = "adamw8bit";
  const Outcome one = run(1, config_);
  expect_equal(exact, one, 0.01, "8 bits");
  for (int ranks : {2, 4}) expect_equal(one, run(ranks, shared_by(ranks)), 5e-4, std::to_string(ranks) + " ranks");
  const auto states = [](const Outcome& o) -> Index {
    return o.summary["measured"]["persistent_bytes"]["optimizer_states"];
  };
  EXPECT_LT(states(one), 0.6 * static_cast<double>(states(exact)));  // embedding and head stay
  EXPECT_EQ(one.summary["optimizer"], "adamw8bit");
}

TEST_F(Trainer, muon_trains_alike_on_any_number_of_ranks) {
  config_.optimizer.kind = "muon";
  config_.train.lr = 1e-2;
  const Outcome one = run(1, config_);
  for (int ranks : {2, 4}) expect_equal(one, run(ranks, shared_by(ranks)), 2e-3, std::to_string(ranks) + " ranks");
  Config config = shared_by(4);
  config.parallel.replicate = 2;
  config.optimizer.replicas = "share";
  expect_equal(one, run(4, config), 2e-3, "2 x 2, shared");
  config.optimizer.momentum_format = "bf16";
  expect_equal(one, run(4, config), 1e-2, "bf16 momentum");
}

TEST_F(Trainer, normuon_and_a_momentum_in_8_bits_train_alike_on_any_number_of_ranks) {
  config_.optimizer.kind = "muon";
  config_.optimizer.normuon = true;
  config_.train.lr = 1e-2;
  const Outcome exact = run(1, config_);
  config_.optimizer.momentum_format = "power";
  const Outcome one = run(1, config_);
  expect_equal(exact, one, 1e-2, "8 bits");
  for (int ranks : {2, 4}) expect_equal(one, run(ranks, shared_by(ranks)), 2e-3, std::to_string(ranks) + " ranks");
}

TEST_F(Trainer, soap_trains_alike_on_any_number_of_ranks) {
  config_.optimizer.kind = "soap";
  config_.optimizer.precondition_frequency = 1;
  const Outcome one = run(1, config_);
  for (int ranks : {2, 4}) expect_equal(one, run(ranks, shared_by(ranks)), 2e-3, std::to_string(ranks) + " ranks");
  Config config = shared_by(4);
  config.parallel.replicate = 2;
  expect_equal(one, run(4, config), 2e-3, "2 x 2");
  config.optimizer.wire_dtype = "bf16";
  expect_equal(one, run(4, config), 1e-2, "bf16 on the wire");
}

TEST_F(Trainer, soap_takes_experts_parts_of_fused_weights_and_long_sides) {
  config_.model.kind = "moe";
  config_.model.feed_forward = 12;
  config_.model.experts = 3;
  config_.optimizer.kind = "soap";
  config_.optimizer.rules = {{.match = "gate_up_proj$", .splits = std::vector<Index>{12, 12}}};
  const Outcome split = run(2, shared_by(2));
  expect_equal(split, run(4, shared_by(4)), 2e-3, "4 ranks");
  config_.optimizer.max_precondition_dim = 12;
  const Outcome one_sided = run(4, shared_by(4));
  EXPECT_NE(one_sided.loss(2), split.loss(2));
}

TEST_F(Trainer, muon_orthogonalises_experts_and_the_parts_of_fused_weights) {
  config_.model.kind = "moe";
  config_.model.feed_forward = 12;
  config_.model.experts = 3;
  config_.optimizer.kind = "muon";
  config_.train.lr = 1e-2;
  const Outcome whole = run(2, shared_by(2));
  config_.optimizer.rules = {{.match = "gate_up_proj$", .splits = std::vector<Index>{12, 12}}};
  const Outcome split = run(2, shared_by(2));
  EXPECT_EQ(split.loss(0), whole.loss(0));
  EXPECT_NE(split.loss(2), whole.loss(2));
  expect_equal(split, run(4, shared_by(4)), 2e-3, "4 ranks");
}

TEST_F(Trainer, rules_deal_parameters_out) {
  config_.optimizer.rules = {
      {.match = "mlp", .kind = "adamw8bit", .state_format = "dynamic"}, {.match = "norm", .lr_scale = 0.0}};
  config_.train.batch = 2;
  run(2, config_);
  config_.optimizer.rules.push_back({.match = "no_such_parameter"});
  EXPECT_THROW(run(2, config_), InvalidArgument);
}

TEST_F(Trainer, mesh_that_does_not_fit_the_ranks_is_refused) {
  config_.parallel.shard = 3;
  EXPECT_THROW(run(2, config_), InvalidArgument);
  config_.parallel.shard = 0;
  config_.parallel.replicate = 3;
  EXPECT_THROW(run(2, config_), InvalidArgument);
}

TEST_F(Trainer, ranks_with_different_text_are_refused) {
  const auto body = [&](comm::World& world) {
    TextData data = some_text();
    data.fingerprint += static_cast<std::uint64_t>(world.rank()) << 8;
    EXPECT_THROW(train(config_, world, data), InvalidArgument);
  };
  test::run_ranks(2, body, test::quick(60));
}

TEST_F(Trainer, block_larger_than_a_matrix_names_the_parameter) {
  config_.parallel.rows = 10;  // k_proj has 8
  try {
    run(1, config_);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("k_proj.weight"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace ragged::train
