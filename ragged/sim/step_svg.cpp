// The picture of step_report.h.
#include <algorithm>
#include <string>

#include <fmt/format.h>

#include "ragged/sim/step_report.h"
#include "ragged/sim/svg.h"
#include "ragged/sim/text.h"

namespace ragged::sim {
namespace {

constexpr double kWidth = 1100;
constexpr double kLeft = 90;
constexpr double kRight = 20;
constexpr double kPlot = kWidth - kLeft - kRight;
constexpr double kTop = 64;
constexpr double kHeight = 260;
constexpr double kLane = 30;
constexpr std::size_t kMostTitles = 200;  // of spans, shown where the pointer is: they make up most of a file
constexpr int kColumns = 280;             // the curve's highest value in each is drawn: peaks stay

constexpr std::string_view kColours[] = {"#4c78a8", "#9d7bb0", "#54a24b", "#f2a541", "#e45756", "#72b7b2"};

std::string_view colour_of(const StepSpan& span) {
  if (span.name.starts_with("forward")) return "#8fb8de";
  if (span.name.starts_with("backward")) return "#4c78a8";
  if (span.name.starts_with("optimizer")) return "#9d7bb0";
  if (span.name.starts_with("all-gather")) return "#e45756";
  if (span.name.starts_with("all-reduce")) return "#b07aa1";
  return "#72b7b2";
}

// By column: what is held at its fullest moment.
std::vector<Bytes> columns(const StepResult& result) {
  std::vector<Bytes> most(kColumns, Bytes{});
  for (std::size_t i = 0; i < result.memory.size(); ++i) {
    const MemoryPoint& point = result.memory[i];
    const double until = i + 1 < result.memory.size() ? result.memory[i + 1].time : result.seconds;
    const auto column = [&](double time) {
      return std::clamp(static_cast<int>(time / result.seconds * kColumns), 0, kColumns - 1);
    };
    for (int c = column(point.time); c <= column(until); ++c) {
      Bytes& fullest = most[static_cast<std::size_t>(c)];
      if (sum(point.bytes) > sum(fullest)) fullest = point.bytes;
    }
  }
  return most;
}

void draw_memory(Svg& svg, const StepRequest& request, const StepResult& result) {
  const bool fits_in_view = request.device.memory < 2.5 * result.peak;
  const double top = 1.08 * (fits_in_view ? std::max(request.device.memory, result.peak) : result.peak);
  const auto y_of = [&](double bytes) { return kTop + kHeight * (1 - bytes / top); };
  const std::vector<Bytes> curve = columns(result);
  std::vector<double> floor(curve.size(), 0.0);
  for (std::size_t use = 0; use < static_cast<std::size_t>(kNumUses); ++use) {
    std::string forth;
    std::string back;
    for (std::size_t c = 0; c < curve.size(); ++c) {
      const double x = kLeft + kPlot * static_cast<double>(c) / (kColumns - 1);
      back = fmt::format("L{:.0f} {:.0f}", x, y_of(floor[c])) + back;
      floor[c] += curve[c][use];
      forth += fmt::format("{}{:.0f} {:.0f}", c == 0 ? "M" : "L", x, y_of(floor[c]));
    }
    svg.path(forth + back + "Z", kColours[use], "none");
  }
  for (int tick = 0; tick <= 4; ++tick) {
    const double bytes = top * tick / 4;
    svg.text(4, y_of(bytes) + 4, bytes_text(bytes), "s");
    svg.line(kLeft, y_of(bytes), kLeft + kPlot, y_of(bytes), "#0002", 0.5);
  }
  if (fits_in_view) {
    svg.line(kLeft, y_of(request.device.memory), kLeft + kPlot, y_of(request.device.memory), "#d62728", 1.5);
    svg.text(kLeft + 4, y_of(request.device.memory) - 4, fmt::format("memory of {}", request.device.name), "s");
  }
  const double x = kLeft + kPlot * result.peak_time / result.seconds;
  svg.line(x, y_of(result.peak) - 6, x, kTop + kHeight, "#222", 1);
  const std::string label = fmt::format("peak {} during {}", bytes_text(result.peak), result.peak_during);
  svg.text(std::min(x + 4, kWidth - kRight - 6.2 * static_cast<double>(label.size())), y_of(result.peak) - 8, label);
}

void draw_lane(Svg& svg, const StepResult& result, Lane lane, double y) {
  svg.text(4, y + kLane / 2 + 4, lane == Lane::kCompute ? "compute" : "network");
  const bool is_short = result.spans.size() <= kMostTitles;
  for (const StepSpan& span : result.spans) {
    if (span.lane != lane) continue;
    const double x = kLeft + kPlot * span.begin / result.seconds;
    const double width = kPlot * (span.end - span.begin) / result.seconds;
    svg.rect(
        x, y, std::max(0.3, width - 0.4), kLane, colour_of(span),
        is_short ? fmt::format("{}: {}", span.name, seconds_text(span.end - span.begin)) : "");
  }
}

}  // namespace

std::string step_svg(const ModelPlan& plan, const StepRequest& request, const StepResult& result) {
  const double lanes = kTop + kHeight + 16;
  Svg svg(kWidth, lanes + 2 * kLane + 56);
  svg.text(
      kLeft, 22,
      fmt::format(
          "{} on {} x {} ranks of {}: one step of {} tokens a rank, {}", plan.model, request.replicas,
          plan.request.ranks, request.device.name, grouped(request.tokens), seconds_text(result.seconds)),
      "t");
  double x = kLeft;
  for (std::size_t use = 0; use < static_cast<std::size_t>(kNumUses); ++use) {
    svg.rect(x, 34, 12, 12, kColours[use]);
    svg.text(x + 16, 44, title(static_cast<Use>(use)));
    x += 44 + 6.6 * static_cast<double>(title(static_cast<Use>(use)).size());
  }
  draw_memory(svg, request, result);
  draw_lane(svg, result, Lane::kCompute, lanes);
  draw_lane(svg, result, Lane::kNetwork, lanes + kLane + 4);
  for (int tick = 0; tick <= 5; ++tick) {
    svg.text(
        kLeft + kPlot * tick / 5 - (tick == 5 ? 46 : 0), lanes + 2 * kLane + 20,
        seconds_text(result.seconds * tick / 5), "s");
  }
  svg.text(
      kLeft, lanes + 2 * kLane + 40,
      fmt::format("compute waits for the network {:.0f} % of the step", 100 * result.exposed_seconds / result.seconds),
      "s");
  return std::move(svg).finish();
}

}  // namespace ragged::sim
