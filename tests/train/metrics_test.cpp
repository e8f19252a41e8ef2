#include "ragged/train/metrics.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

namespace ragged::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

std::set<std::string> names(const Json& object) {
  std::set<std::string> result;
  for (const auto& item : object.items()) result.insert(item.key());
  return result;
}

std::string read(const fs::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

class Report : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("ragged_report_" + std::to_string(getpid()));
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path folder_;
};

const StepMetrics kStep{
    .step = 3,
    .loss = 2.5,
    .grad_norm = 0.5,
    .lr = 1e-3,
    .tokens_per_s = 4096,
    .step_ms = 250,
    .comm_wait = 0.125,
    .peak_bytes = 1 << 20};

TEST(Metrics, json_line_has_the_documented_fields) {
  const Json object = Json::parse(to_json_line(kStep));
  EXPECT_EQ(
      names(object),
      (std::set<std::string>{
          "step", "loss", "grad_norm", "lr", "tokens_per_s", "step_ms", "comm_wait", "peak_bytes", "skipped"}));
  EXPECT_EQ(object["step"], 3);
  EXPECT_EQ(object["comm_wait"], 0.125);
  EXPECT_EQ(object["peak_bytes"], 1 << 20);
}

TEST(Metrics, json_line_has_a_validation_loss_where_there_is_one) {
  StepMetrics metrics = kStep;
  metrics.val_loss = 2.25;
  EXPECT_EQ(Json::parse(to_json_line(metrics))["val_loss"], 2.25);
}

TEST(Metrics, json_stays_valid_when_a_number_is_not_finite) {
  StepMetrics metrics = kStep;
  metrics.loss = std::nan("");
  metrics.grad_norm = std::numeric_limits<double>::infinity();
  const Json object = Json::parse(to_json_line(metrics));
  EXPECT_TRUE(object["loss"].is_null());
  EXPECT_TRUE(object["grad_norm"].is_null());
}

TEST(Metrics, summary_has_planned_and_measured_with_equal_fields) {
  const Json object = Json::parse(to_json(RunSummary{.planned = {.padding_bytes = 7}}));
  const std::set<std::string> fields{"padding_bytes",  "gathered_bytes", "reduced_bytes",    "cast_bytes",
                                     "gradient_bytes", "copied_bytes",   "peak_image_bytes", "persistent_bytes"};
  EXPECT_EQ(names(object["planned"]), fields);
  EXPECT_EQ(names(object["measured"]), fields);
  EXPECT_EQ(object["planned"]["padding_bytes"], 7);
  EXPECT_EQ(
      names(object["measured"]["persistent_bytes"]),
      (std::set<std::string>{"parameters", "gradients", "optimizer_states", "total"}));
  const PersistentBytes held{.parameters = 1, .gradients = 20, .optimizer_states = 300};
  EXPECT_EQ(
      Json::parse(to_json(RunSummary{.planned = {.persistent_bytes = held}}))["planned"]["persistent_bytes"]["total"],
      321);
}

TEST(Metrics, console_line_shows_all_that_is_documented) {
  EXPECT_EQ(
      console_line(kStep, 100),
      "step   3/100  loss 2.5000  norm 0.500  lr 1.00e-03    4096 tok/s    250 ms  wait 12%  "
      "mem 1.0 MiB");
}

TEST(Metrics, console_line_counts_skipped_steps) {
  StepMetrics metrics = kStep;
  metrics.skipped = 2;
  EXPECT_EQ(console_line(metrics, 100), console_line(kStep, 100) + "  skipped 2");
}

TEST(Metrics, table_marks_what_is_equal_and_what_is_not) {
  const std::string table = bytes_table({.padding_bytes = 1234567, .cast_bytes = 4}, {.padding_bytes = 1234567});
  std::istringstream lines(table);
  std::string line;
  while (std::getline(lines, line)) {
    if (line.find("padding") != std::string::npos) {
      EXPECT_NE(line.find("1,234,567"), std::string::npos) << line;
      EXPECT_NE(line.find("equal"), std::string::npos) << line;
    }
    if (line.find("masters cast") != std::string::npos) {
      EXPECT_NE(line.find("DIFFERS"), std::string::npos) << line;
    }
  }
}

TEST(Metrics, bytes_read_well) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes(Index{5} << 30), "5.0 GiB");
}

TEST_F(Report, writes_one_line_a_step_and_a_summary) {
  Reporter reporter(true, folder_ / "deep" / "run");
  reporter.step(kStep, 10, false);
  reporter.step(kStep, 10, false);
  reporter.finish({.steps = 2});
  std::istringstream lines(read(reporter.dir() / "metrics.jsonl"));
  std::string line;
  int count = 0;
  while (std::getline(lines, line)) count += Json::parse(line)["step"] == 3 ? 1 : 0;
  EXPECT_EQ(count, 2);
  EXPECT_EQ(Json::parse(read(reporter.dir() / "summary.json"))["steps"], 2);
  EXPECT_FALSE(fs::exists(reporter.dir() / "summary.json.tmp"));
}

TEST_F(Report, other_ranks_write_nothing) {
  Reporter reporter(false, folder_);
  reporter.step(kStep, 10, true);
  reporter.finish({});
  EXPECT_FALSE(fs::exists(folder_));
}

TEST_F(Report, folder_that_cannot_be_written_is_named) {
  fs::create_directories(folder_);
  std::ofstream(folder_ / "file") << "x";
  try {
    Reporter(true, folder_ / "file" / "run");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("run.dir"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace ragged::train
