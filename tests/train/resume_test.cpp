// Runs that stop and go on: the same numbers as without the stop, on the same ranks to the last bit.
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "ragged/checkpoint/publish.h"
#include "ragged/train/checkpointing.h"
#include "ragged/train/stop_signal.h"
#include "ragged/train/trainer.h"
#include "tests/support/ranks.h"
#include "tests/train/text.h"

namespace ragged::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TextData some_text() {
  std::string text;
  for (int i = 0; i < 400; ++i) text += "while n > " + std::to_string(i * i % 89) + ":\n    n -= 1\n";
  return text_in_memory(text, 54321);
}

// What a step computed, without what it took.
using Numbers = std::vector<std::vector<double>>;

Numbers numbers_of(const fs::path& run) {
  Numbers numbers;
  std::ifstream lines(run / "metrics.jsonl");
  for (std::string line; std::getline(lines, line);) {
    const Json step = Json::parse(line);
    numbers.push_back({step["step"], step["loss"], step["grad_norm"], step["lr"], step.value("val_loss", -1.0)});
  }
  return numbers;
}

class Resume : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::temp_directory_path() / ("ragged_resume_" + std::to_string(getpid()) + "_" + test->name());
    config_.model = {.dim = 24, .layers = 2, .heads = 6, .kv_heads = 2, .feed_forward = 20};
    config_.train.steps = 7;
    config_.train.batch = 2;
    config_.train.sequence = 16;
    config_.train.warmup = 2;
    config_.train.param_dtype = "fp32";
    config_.eval.sequences = 5;
    config_.eval.every = 3;
    config_.eval.sample_bytes = 0;
    config_.checkpoint.every = 2;
    config_.run.device = "cpu";
  }
  void TearDown() override { fs::remove_all(folder_); }

  // The whole run, in a folder of its own.
  Numbers without_stop(int ranks, Config config) const {
    config.run.dir = (folder_ / ("whole" + std::to_string(ranks))).string();
    fs::remove_all(config.run.dir);
    test::run_ranks(
        ranks, [&](comm::World& world) { train(config, world, some_text()); }, test::quick(60));
    return numbers_of(config.run.dir);
  }

  // Stops during step `stop`, which one rank is asked to, then goes on to the end on `ranks_after`.
  Numbers with_stop(int ranks, Config config, int stop, int ranks_after) const {
    config.run.dir = run_dir().string();
    fs::remove_all(config.run.dir);
    const auto first = [&](comm::World& world) {
      int asked = 0;
      const auto request = [&] { return ++asked == stop && world.rank() == world.size() - 1 ? SIGTERM : 0; };
      const RunSummary summary = train(config, world, some_text(), request);
      EXPECT_EQ(summary.steps, stop);
    };
    test::run_ranks(ranks, first, test::quick(60));
    EXPECT_FALSE(fs::exists(run_dir() / "summary.json"));
    EXPECT_EQ(numbers_of(run_dir()).size(), static_cast<std::size_t>(stop));
    EXPECT_EQ(checkpoint::CheckpointFolders(run_dir() / "checkpoints").steps().back(), stop);
    go_on(ranks_after, config);
    return numbers_of(run_dir());
  }

  void go_on(int ranks, Config config) const {
    config.run.dir = run_dir().string();
    config.checkpoint.resume = "auto";
    test::run_ranks(
        ranks, [&](comm::World& world) { train(config, world, some_text()); }, test::quick(60));
  }

  fs::path run_dir() const { return folder_ / "run"; }

  fs::path folder_;
  Config config_;
};

TEST_F(Resume, is_the_run_without_a_stop_bit_for_bit) {
  for (int ranks : {1, 2, 3}) {
    for (const bool async : {false, true}) {
      config_.checkpoint.async = async;
      const Numbers whole = without_stop(ranks, config_);
      ASSERT_EQ(whole.size(), 7u);
      for (int stop : {1, 2, 5}) {
        EXPECT_EQ(with_stop(ranks, config_, stop, ranks), whole)
            << ranks << " ranks, stop at " << stop << (async ? ", async" : "");
      }
    }
  }
}

TEST_F(Resume, holds_for_replicas_blocks_bf16_and_accumulation) {
  config_.train.accumulate = 2;
  config_.parallel.replicate = 2;
  config_.parallel.rows = 4;
  config_.train.param_dtype = "bf16";
  config_.optimizer.moment_dtype = "bf16";
  EXPECT_EQ(with_stop(4, config_, 3, 4), without_stop(4, config_));
}

// Each optimizer that a config can name.
TEST_F(Resume, holds_for_every_optimizer) {
  for (const std::string_view kind : optim::optimizer_kinds()) {
    config_.optimizer.kind = kind;
    Numbers whole;
    try {
      whole = without_stop(2, config_);
    } catch (const InternalError& error) {
      if (std::string_view(error.what()).find("has no constructor") == std::string_view::npos) throw;
      continue;  // a kind of which there is only the name
    }
    EXPECT_EQ(with_stop(2, config_, 3, 2), whole) << kind;
  }
}

TEST_F(Resume, goes_on_with_another_number_of_ranks) {
  // The global batch stays the same, so that the losses can.
  config_.train.batch = 4;
  const Numbers whole = without_stop(1, config_);
  for (const auto& [before, after] : {std::pair{1, 4}, {4, 2}, {2, 1}}) {
    Config config = config_;
    config.train.batch = 4 / before;
    config.run.dir = run_dir().string();
    fs::remove_all(run_dir());
    const auto first = [&](comm::World& world) {
      int asked = 0;
      train(config, world, some_text(), [&] { return ++asked == 3 ? SIGINT : 0; });
    };
    test::run_ranks(before, first, test::quick(60));
    config.train.batch = 4 / after;
    go_on(after, config);
    const Numbers numbers = numbers_of(run_dir());
    ASSERT_EQ(numbers.size(), whole.size());
    for (std::size_t i = 0; i < whole.size(); ++i) {
      for (std::size_t field : {1, 2}) {
        EXPECT_NEAR(numbers[i][field], whole[i][field], 2e-5 * whole[i][field])
            << before << " -> " << after << ", step " << i + 1;
      }
    }
  }
}

TEST_F(Resume, from_an_earlier_checkpoint_repeats_the_steps_after_it) {
  config_.checkpoint.keep = 0;
  config_.run.dir = run_dir().string();
  const Numbers whole = without_stop(2, config_);
  test::run_ranks(
      2, [&](comm::World& world) { train(config_, world, some_text()); }, test::quick(60));
  EXPECT_THAT(checkpoint::CheckpointFolders(run_dir() / "checkpoints").steps(), ElementsAre(2, 4, 6, 7));
  config_.checkpoint.resume = (run_dir() / "checkpoints" / "step-4").string();
  test::run_ranks(
      2, [&](comm::World& world) { train(config_, world, some_text()); }, test::quick(60));
  EXPECT_EQ(numbers_of(run_dir()), whole);
}

TEST_F(Resume, of_a_finished_run_does_nothing_and_of_none_begins) {
  config_.checkpoint.resume = "auto";
  config_.run.dir = run_dir().string();
  const auto run = [&] {
    test::run_ranks(
        2, [&](comm::World& world) { EXPECT_EQ(train(config_, world, some_text()).steps, 7); }, test::quick(60));
  };
  run();
  const Numbers numbers = numbers_of(run_dir());
  EXPECT_EQ(numbers.size(), 7u);
  run();
  EXPECT_EQ(numbers_of(run_dir()), numbers);
}

TEST_F(Resume, into_another_model_is_refused_and_leaves_the_run_as_it_was) {
  with_stop(2, config_, 3, 2);
  const Numbers numbers = numbers_of(run_dir());
  config_.model.feed_forward = 28;
  try {
    go_on(2, config_);
    FAIL();
  } catch (const CheckpointError& error) {
    EXPECT_THAT(error.what(), HasSubstr("gate_proj.weight"));
  }
  EXPECT_EQ(numbers_of(run_dir()), numbers);
}

TEST_F(Resume, without_an_interval_nothing_is_saved) {
  config_.checkpoint.every = 0;
  config_.run.dir = run_dir().string();
  test::run_ranks(
      1, [&](comm::World& world) { train(config_, world, some_text()); }, test::quick(60));
  EXPECT_FALSE(fs::exists(run_dir() / "checkpoints"));
}

TEST(LinesUpTo, keeps_whole_lines_of_the_steps_before) {
  const std::string text =
      "{\"step\":1,\"loss\":2}\nnot json\n{\"step\":2}\n{\"loss\":1}\n{\"step\":3}\n{\"step\":2,\"lo";
  EXPECT_EQ(lines_up_to(text, 2), "{\"step\":1,\"loss\":2}\n{\"step\":2}\n");
  EXPECT_EQ(lines_up_to("", 2), "");
}

TEST(ConfigChanges, names_what_differs_but_not_where_the_run_lies) {
  Config before;
  Config now;
  now.train.lr = 0.5;
  now.model.layers = 9;
  now.run.dir = "elsewhere";
  now.checkpoint.every = 3;
  EXPECT_THAT(
      config_changes(to_toml(before), to_toml(now)), ElementsAre("model.layers: 4 -> 9", "train.lr: 0.003 -> 0.5"));
  EXPECT_THAT(config_changes("", "[a]\nb = 1\n"), ElementsAre("a.b: (none) -> 1"));
}

TEST(StopSignal, notes_the_first_and_puts_back_what_was_there) {
  struct sigaction before {};
  sigaction(SIGTERM, nullptr, &before);
  {
    const StopSignal signal;
    EXPECT_EQ(signal.number(), 0);
    std::raise(SIGTERM);
    EXPECT_EQ(signal.number(), SIGTERM);
    for (int number : {SIGTERM, SIGINT}) {
      struct sigaction now {};
      sigaction(number, nullptr, &now);
      EXPECT_EQ(now.sa_handler, SIG_DFL) << "a second one ends the process";
    }
    EXPECT_THROW(StopSignal(), InvalidArgument);
  }
  struct sigaction after {};
  sigaction(SIGTERM, nullptr, &after);
  EXPECT_EQ(after.sa_handler, before.sa_handler);
  const StopSignal again;
  EXPECT_EQ(again.number(), 0);
  EXPECT_EQ(signal_name(SIGINT), "SIGINT");
}

}  // namespace
}  // namespace ragged::train
