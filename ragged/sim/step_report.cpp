#include "ragged/sim/step_report.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "ragged/sim/text.h"

namespace ragged::sim {
namespace {

std::string_view name_of(Checkpointing checkpointing) {
  return checkpointing == Checkpointing::kFull ? "full" : "none";
}

double percent(double part, double whole) {
  return whole > 0 ? 100 * part / whole : 0;
}

// The largest value that each use has at any time; they needn't meet.
Bytes highest(const StepResult& result) {
  Bytes most{};
  for (const MemoryPoint& point : result.memory) {
    for (std::size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], point.bytes[i]);
  }
  return most;
}

nlohmann::ordered_json bytes_json(const Bytes& bytes) {
  nlohmann::ordered_json json;
  for (int use = 0; use < kNumUses; ++use) {
    json[std::string(key(static_cast<Use>(use)))] = std::llround(bytes[static_cast<std::size_t>(use)]);
  }
  return json;
}

}  // namespace

std::string step_text(const ModelPlan& plan, const StepRequest& request, const StepResult& result, bool colour) {
  const Device& device = request.device;
  std::string text = bold(
      fmt::format(
          "{} on {} x {} ranks of {}, {} tokens a rank", plan.model, request.replicas, grouped(plan.request.ranks),
          device.name, grouped(request.tokens)),
      colour);
  text += fmt::format(
      "\n{}, checkpointing {}, prefetch {}, {} after forward, {} layer{} a bucket\n\n", name(request.optimizer),
      name_of(request.checkpointing), request.prefetch, request.reshard_after_forward ? "resharded" : "kept gathered",
      plan.request.layers_per_bucket, plan.request.layers_per_bucket == 1 ? "" : "s");

  Table memory({"memory of the fullest rank", "at the peak", "most ever"});
  const Bytes most = highest(result);
  for (std::size_t i = 0; i < most.size(); ++i) {
    memory.add({std::string(title(static_cast<Use>(i))), bytes_text(result.at_peak[i]), bytes_text(most[i])});
  }
  memory.rule();
  memory.add({"all", bytes_text(result.peak), ""});
  text += memory.to_string(colour);
  text += fmt::format(
      "peak at {} of {}, during {}; {:.0f} % of the {} of a device\n\n", seconds_text(result.peak_time),
      seconds_text(result.seconds), result.peak_during, percent(result.peak, device.memory), bytes_text(device.memory));

  Table time({"time of a step", "", "share"});
  const auto row = [&](const char* what, double seconds) {
    time.add({what, seconds_text(seconds), fmt::format("{:.0f} %", percent(seconds, result.seconds))});
  };
  row("compute busy", result.compute_seconds);
  row("network busy", result.network_seconds);
  row("compute waits for the network", result.exposed_seconds);
  time.rule();
  row("step", result.seconds);
  text += time.to_string(colour);
  const double tokens = static_cast<double>(request.tokens) / result.seconds;
  text += fmt::format(
      "{} tokens a second and rank, {} in all; {:.1f} % of peak FLOP/s\n", grouped(std::llround(tokens)),
      grouped(std::llround(tokens * plan.request.ranks * request.replicas)), 100 * result.mfu);
  text += fmt::format(
      "{} gathered, {} reduced a rank and step\n", bytes_text(result.gathered_bytes), bytes_text(result.reduced_bytes));
  const std::vector<std::string> lines = advice(plan, request, result);
  if (!lines.empty()) text += "\n" + bold("to lower the peak", colour) + "\n";
  for (const std::string& line : lines) text += "  " + line + "\n";
  text += fmt::format(
      "\nassumed: {:.0f} % of {:.0f} TFLOP/s, {:.0f} % of {:.0f} GB/s within a node of {} and of {:.0f} GB/s a rank "
      "between nodes\n",
      100 * device.flops_efficiency, device.flops / 1e12, 100 * device.bandwidth_efficiency,
      device.node_bandwidth / 1e9, device.ranks_per_node, device.network_bandwidth / 1e9);
  if (plan.facts.attention_width == 0) {
    text += "note: the number of heads isn't known, so the time of attention itself is left out.\n";
  }
  return text;
}

std::string step_json(const ModelPlan& plan, const StepRequest& request, const StepResult& result) {
  const nlohmann::ordered_json json = {
      {"format", 1},
      {"model", plan.model},
      {"ranks", plan.request.ranks * request.replicas},
      {"shard", plan.request.ranks},
      {"replicas", request.replicas},
      {"device", request.device.name},
      {"tokens", request.tokens},
      {"optimizer", name(request.optimizer)},
      {"checkpointing", name_of(request.checkpointing)},
      {"prefetch", request.prefetch},
      {"reshard_after_forward", request.reshard_after_forward},
      {"padding", plan.padding_fraction()},
      {"seconds", result.seconds},
      {"compute_seconds", result.compute_seconds},
      {"network_seconds", result.network_seconds},
      {"exposed_seconds", result.exposed_seconds},
      {"mfu", result.mfu},
      {"gathered_bytes", std::llround(result.gathered_bytes)},
      {"reduced_bytes", std::llround(result.reduced_bytes)},
      {"peak_bytes", std::llround(result.peak)},
      {"peak_seconds", result.peak_time},
      {"peak_during", result.peak_during},
      {"at_peak", bytes_json(result.at_peak)},
      {"highest", bytes_json(highest(result))},
      {"advice", advice(plan, request, result)}};
  return json.dump(2);
}

std::string step_trace(const StepResult& result) {
  nlohmann::ordered_json events = nlohmann::ordered_json::array();
  const auto name_track = [&](int track, const char* name) {
    events.push_back({{"name", "thread_name"}, {"ph", "M"}, {"pid", 0}, {"tid", track}, {"args", {{"name", name}}}});
  };
  name_track(0, "compute");
  name_track(1, "network");
  for (const StepSpan& span : result.spans) {
    events.push_back(
        {{"name", span.name},
         {"ph", "X"},
         {"pid", 0},
         {"tid", span.lane == Lane::kCompute ? 0 : 1},
         {"ts", span.begin * 1e6},
         {"dur", (span.end - span.begin) * 1e6}});
  }
  for (const MemoryPoint& point : result.memory) {
    events.push_back(
        {{"name", "bytes"}, {"ph", "C"}, {"pid", 0}, {"ts", point.time * 1e6}, {"args", bytes_json(point.bytes)}});
  }
  const nlohmann::ordered_json trace = {{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}};
  return trace.dump() + "\n";
}

}  // namespace ragged::sim
