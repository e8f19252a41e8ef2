// The walk of one step: against the runtime's own forecast, by hand, and what must hold for any model.
#include "ragged/sim/step.h"

#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ragged/fsdp/forecast.h"
#include "ragged/plan/planner.h"
#include "ragged/sim/step_report.h"
#include "tests/sim/files.h"
#include "tests/support/expect_error.h"

namespace ragged::sim {
namespace {

using ::testing::HasSubstr;

ModelPlan planned(const std::string& model, int ranks, Index rows = 1, int layers_per_bucket = 1) {
  return plan_model(
      load_model(model), {.ranks = ranks, .policy = {.rows = rows}, .layers_per_bucket = layers_per_bucket});
}

Device slow() {
  Device device;
  device.latency = 1e-5;
  return device;
}

// Twin of the simulation's books: the forecast that real runs are held equal to, for a root without parameters over
// the units in the order they run.
fsdp::StepForecast forecast(const ModelPlan& plan, const StepRequest& request) {
  std::vector<fsdp::UnitForecastInput> units{{.name = "root", .reshard_after_forward = false}};
  std::vector<int> parents{-1};
  for (const int k : plan.unit_kinds) {
    units.push_back(
        {.groups = {{.plan = &plan.kinds[static_cast<std::size_t>(k)].plan, .param_bytes = 2, .reduce_bytes = 4}},
         .parent = 0,
         .reshard_after_forward = request.reshard_after_forward});
    parents.push_back(0);
  }
  return fsdp::forecast_step(
      units, fsdp::module_order_events(parents),
      {.backward_prefetch = request.prefetch, .forward_prefetch = request.prefetch});
}

TEST(Step, images_and_traffic_are_those_of_the_runtimes_forecast) {
  for (const char* model : {"llama-3-8b", "gpt-oss-20b-fused", "deepseek-v3-671b-fused"}) {
    const ModelPlan plan = planned(model, 64, 16);
    for (const int prefetch : {0, 1, 3}) {
      for (const bool reshards : {true, false}) {
        const StepRequest request{.device = slow(), .reshard_after_forward = reshards, .prefetch = prefetch};
        const StepResult result = simulate_step(plan, request);
        const fsdp::StepForecast expected = forecast(plan, request);
        SCOPED_TRACE(std::string(model) + ", prefetch " + std::to_string(prefetch) + (reshards ? "" : ", kept"));
        EXPECT_EQ(static_cast<Index>(result.peak_images), expected.peak_image_bytes);
        EXPECT_EQ(static_cast<Index>(result.gathered_bytes), expected.gathered_bytes);
        EXPECT_EQ(static_cast<Index>(result.reduced_bytes), expected.reduced_bytes);
        EXPECT_LE(static_cast<Index>(result.peak_reduce), expected.peak_reduce_bytes);
      }
    }
  }
}

TEST(Step, gradients_that_are_summed_after_they_travelled_travel_as_computed) {
  const ModelPlan plan = planned("llama-3.2-1b", 8);
  StepRequest request{.device = slow()};
  const StepResult widened = simulate_step(plan, request);
  request.device.sums_after_transfer = true;
  const StepResult as_computed = simulate_step(plan, request);
  EXPECT_EQ(2 * as_computed.reduced_bytes, widened.reduced_bytes);
  EXPECT_EQ(2 * as_computed.peak_reduce, widened.peak_reduce);
  EXPECT_EQ(as_computed.gathered_bytes, widened.gathered_bytes);
  request.reduce_bytes = 2;
  EXPECT_EQ(simulate_step(plan, request).reduced_bytes, as_computed.reduced_bytes);
}

TEST(Step, what_a_step_takes_it_gives_back) {
  for (const char* model : {"gpt2-124m", "llama-3.2-1b", "qwen3-30b-a3b-perexpert"}) {
    for (const Checkpointing checkpointing : {Checkpointing::kNone, Checkpointing::kFull}) {
      const ModelPlan plan = planned(model, 8);
      const StepResult result = simulate_step(plan, {.device = slow(), .checkpointing = checkpointing});
      ASSERT_GE(result.memory.size(), 2u);
      for (const MemoryPoint& point : result.memory) {
        for (const double bytes : point.bytes) EXPECT_GE(bytes, 0.0);
      }
      const Bytes& last = result.memory.back().bytes;
      EXPECT_NEAR(sum(last), last[0] + last[1], 1.0) << model;
      EXPECT_NEAR(sum(result.at_peak), result.peak, 1.0);
      EXPECT_FALSE(result.peak_during.empty());
    }
  }
}

TEST(Step, time_is_at_least_what_either_side_needs) {
  const ModelPlan plan = planned("llama-3-70b", 256);
  double before = 0;
  for (const int prefetch : {4, 2, 1, 0}) {
    const StepResult result = simulate_step(plan, {.device = slow(), .prefetch = prefetch});
    EXPECT_GE(result.seconds, result.compute_seconds);
    EXPECT_GE(result.seconds, result.network_seconds);
    EXPECT_NEAR(result.seconds, result.compute_seconds + result.exposed_seconds, 1e-9);
    EXPECT_GE(result.seconds, before - 1e-12) << "less prefetch can't be faster";
    before = result.seconds;
  }
  for (const Lane lane : {Lane::kCompute, Lane::kNetwork}) {
    double end = 0;
    for (const StepSpan& span : simulate_step(plan, {.device = slow()}).spans) {
      if (span.lane != lane) continue;
      EXPECT_GE(span.begin, end - 1e-12);
      end = span.end;
    }
  }
}

TEST(Step, one_rank_has_no_network) {
  const StepResult result = simulate_step(planned("gpt2-124m", 1), {});
  EXPECT_EQ(result.network_seconds, 0);
  EXPECT_EQ(result.gathered_bytes, 0);
  EXPECT_NEAR(result.seconds, result.compute_seconds, 1e-12);
}

TEST(Step, a_tied_embedding_stays_gathered) {
  const ModelPlan plan = planned("llama-3.2-1b", 8);
  const StepResult result = simulate_step(plan, {.prefetch = 0});
  double root = 0;
  double largest = 0;
  for (const UnitKind& kind : plan.kinds) {
    double& image = kind.is_layer ? largest : root;
    image = std::max(image, 2.0 * static_cast<double>(kind.plan.image_numel()));
  }
  EXPECT_EQ(result.peak_images, root + largest);
}

TEST(Step, flops_are_six_a_parameter_and_token_where_attention_is_short) {
  const ModelPlan plan = planned("llama-3-70b", 8);
  const StepResult result = simulate_step(plan, {.tokens = 4096, .sequence = 1});
  const double matrices = static_cast<double>(plan.numel) - 128256.0 * 8192;  // less the table
  EXPECT_NEAR(result.flops / (6 * matrices * 4096), 1.0, 0.001);
  // A mixture computes with the experts that a token uses: 5.1 billion of 117 with the table, 4.5 without.
  const ModelPlan mixture = planned("gpt-oss-120b-fused", 8);
  const StepResult active = simulate_step(mixture, {.tokens = 4096, .sequence = 1});
  EXPECT_NEAR(active.flops / (6 * 5.1e9 * 4096), 1.0, 0.15);
}

TEST(Step, experts_one_by_one_cost_what_a_stack_costs) {
  const StepRequest request{.device = slow(), .checkpointing = Checkpointing::kNone};
  const StepResult fused = simulate_step(planned("mixtral-8x7b-fused", 8), request);
  const StepResult apart = simulate_step(planned("mixtral-8x7b-perexpert", 8), request);
  EXPECT_NEAR(fused.flops / apart.flops, 1.0, 1e-6);
  EXPECT_NEAR(fused.peak / apart.peak, 1.0, 0.05);
}

TEST(Step, checkpointing_trades_memory_for_time) {
  const ModelPlan plan = planned("llama-3-8b", 8);
  const StepResult none = simulate_step(plan, {.checkpointing = Checkpointing::kNone});
  const StepResult full = simulate_step(plan, {.checkpointing = Checkpointing::kFull});
  EXPECT_GT(none.peak, 2 * full.peak);
  EXPECT_LT(none.seconds, full.seconds);
}

TEST(Step, advice_is_ordered_and_true) {
  const ModelPlan plan = planned("llama-3-8b", 8);
  const StepRequest request{.checkpointing = Checkpointing::kNone};
  const std::vector<std::string> lines = advice(plan, request, simulate_step(plan, request));
  ASSERT_FALSE(lines.empty());
  EXPECT_THAT(lines[0], HasSubstr("--checkpointing full"));
}

TEST(Step, replicas_reduce_across_the_network) {
  const ModelPlan plan = planned("llama-3-8b", 8);
  EXPECT_GT(
      simulate_step(plan, {.replicas = 32}).network_seconds, simulate_step(plan, {.replicas = 1}).network_seconds);
}

TEST(Step, bad_requests_are_refused) {
  const ModelPlan plan = planned("gpt2-124m", 2);
  EXPECT_INVALID(simulate_step(plan, {.tokens = 0}), "--tokens");
  EXPECT_INVALID(simulate_step(plan, {.sequence = -1}), "--sequence");
  EXPECT_INVALID(simulate_step(plan, {.replicas = 0}), "replica");
  EXPECT_INVALID(simulate_step(plan, {.prefetch = -1}), "--prefetch");
}

TEST(StepReport, text_json_picture_and_trace) {
  const ModelPlan plan = planned("gpt-oss-20b-fused", 64, 16);
  const StepRequest request{.device = slow()};
  const StepResult result = simulate_step(plan, request);
  EXPECT_THAT(step_text(plan, request, result, false), HasSubstr("gathered images"));
  const auto json = nlohmann::json::parse(step_json(plan, request, result));
  EXPECT_NEAR(json.at("peak_bytes").get<double>(), result.peak, 1.0);
  EXPECT_TRUE(json.at("at_peak").contains("images"));
  const std::string svg = step_svg(plan, request, result);
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
  EXPECT_LT(svg.size(), 80'000u);
  const auto trace = nlohmann::json::parse(step_trace(result));
  EXPECT_EQ(trace.at("traceEvents").size(), 2 + result.spans.size() + result.memory.size());
}

TEST(Device, a_layer_of_gpt_oss_takes_about_what_was_measured) {
  // Published for 64 H800: 43.71 ms to gather a layer's bf16 image, 94.24 ms to reduce its fp32 gradients.
  const Device h800 = load_device("h800");
  const double elements = 3.21e9;
  EXPECT_NEAR(gather_seconds(h800, 2 * elements, 64) / 43.71e-3, 1.0, 0.1);
  EXPECT_NEAR(gather_seconds(h800, 4 * elements, 64) / 94.24e-3, 1.0, 0.1);
}

TEST(Device, collectives_by_hand) {
  const Device device{
      .ranks_per_node = 2,
      .node_bandwidth = 100,
      .network_bandwidth = 10,
      .bandwidth_efficiency = 0.5,
      .latency = 1,
      .hop_latency = 2};
  EXPECT_DOUBLE_EQ(gather_seconds(device, 1000, 1), 0);
  EXPECT_DOUBLE_EQ(gather_seconds(device, 1000, 2), 1 + 1000 * 0.5 / 100 / 0.5);
  EXPECT_DOUBLE_EQ(gather_seconds(device, 1000, 8), 1 + 2 * 3 + 1000 * 0.75 / 20 / 0.5);
  EXPECT_DOUBLE_EQ(gather_seconds(device, 1000, 2, 5), 5 + 1000 * 0.5 / 100 / 0.5);
  EXPECT_DOUBLE_EQ(all_reduce_seconds(device, 1000, 1, 8), 0);
  EXPECT_DOUBLE_EQ(all_reduce_seconds(device, 1000, 2, 8), 2 + 2 + 2 * 1000 * 0.5 / 10 / 0.5);
}

TEST(Device, files_and_their_faults) {
  const Device mine = device_from_json(R"({"base": "a100", "name": "mine", "memory": 40e9, "ranks_per_node": 4})", "x");
  EXPECT_EQ(mine.name, "mine");
  EXPECT_EQ(mine.memory, 40e9);
  EXPECT_EQ(mine.ranks_per_node, 4);
  EXPECT_EQ(mine.flops, load_device("a100").flops);
  EXPECT_INVALID(device_from_json("[", "x.json"), "x.json");
  EXPECT_INVALID(device_from_json(R"({"flops": )" + std::string(5000, '[') + "}", "x.json"), "x.json");
  EXPECT_INVALID(device_from_json(R"({"flop": 3})", "x.json"), "Did you mean 'flops'?");
  EXPECT_INVALID(device_from_json(R"({"flops": -3})", "x.json"), "positive");
  EXPECT_INVALID(device_from_json(R"({"flops": "fast"})", "x.json"), "positive");
  EXPECT_INVALID(device_from_json(R"({"ranks_per_node": 2.5})", "x.json"), "whole number");
  EXPECT_INVALID(device_from_json(R"({"base": "h1000"})", "x.json"), "h100");
  EXPECT_INVALID(load_device("b300"), "Expected one of a100, cpu, h100");
  const ::ragged::testing::TempFolder folder;
  folder.write("own.json", R"({"flops": 1e12})");
  EXPECT_EQ(load_device(folder.path("own.json").string()).name, "own");
}

}  // namespace
}  // namespace ragged::sim
