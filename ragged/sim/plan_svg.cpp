// The picture of plan_report.h.
#include <algorithm>
#include <map>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ragged/sim/plan_report.h"
#include "ragged/sim/svg.h"
#include "ragged/sim/text.h"

namespace ragged::sim {
namespace {

using plan::Segment;
using plan::SegmentKind;

constexpr double kWidth = 1100;
constexpr double kLeft = 20;
constexpr double kBar = kWidth - 2 * kLeft;
constexpr double kBarHeight = 34;
constexpr double kRowHeight = 92;
constexpr double kTop = 78;
constexpr double kBorderGap = 4;  // borders nearer than this would be a grey area
constexpr const char* kPadding = "#d62728";

struct Role {
  std::string_view name;
  std::string_view colour;
};
constexpr Role kRoles[] = {{"attention", "#4c78a8"},       {"experts", "#f2a541"}, {"MLP", "#72b7b2"},
                           {"embedding, head", "#9d7bb0"}, {"router", "#e377c2"},  {"vectors", "#7f7f7f"}};

const Role& role_of(const plan::InventoryTensor& tensor) {
  const std::string& role = tensor.role;
  if (tensor.shape.size() < 2) return kRoles[5];
  if (role.starts_with("attn")) return kRoles[0];
  if (role.starts_with("expert")) return kRoles[1];
  if (role == "embed" || role == "head" || tensor.kind == "embedding") return kRoles[3];
  if (role.starts_with("router")) return kRoles[4];
  return kRoles[2];
}

std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}

class Bar {
 public:
  Bar(Svg& svg, const UnitKind& kind, double y)
      : svg_(svg),
        kind_(kind),
        y_(y),
        scale_(kBar / static_cast<double>(std::max<Index>(1, kind.plan.image_numel()))) {}

  void draw() {
    for (const Segment& segment : kind_.plan.segments) {
      if (segment.numel == 0) continue;
      draw_tensors(segment);
      draw_borders(segment);
      const double x = x_of(segment.image_offset);
      if (segment.image_offset > 0) svg_.line(x, y_ - 7, x, y_ + kBarHeight + 7, "#000", 2);
      const bool is_uniform = segment.kind == SegmentKind::kUniform;
      const std::string label = is_uniform ? fmt::format("S = {}", grouped(segment.shard_size))
                                           : fmt::format("ragged: {}", segment.params.size());
      // Ragged parts are labelled above, for they are narrow and last.
      const double room = kWidth - 5.6 * static_cast<double>(label.size());
      svg_.text(std::min(x + 2, room), is_uniform ? y_ + kBarHeight + 18 : y_ - 8, label, "s");
    }
  }

 private:
  double x_of(Index position) const { return kLeft + static_cast<double>(position) * scale_; }

  // Neighbours of one role that are too narrow to see become one box.
  void draw_tensors(const Segment& segment) {
    svg_.rect(
        x_of(segment.image_offset), y_, static_cast<double>(segment.numel) * scale_, kBarHeight, kPadding,
        fmt::format(
            "padding {}", percent_text(static_cast<double>(kind_.plan.padding()) / static_cast<double>(kind_.numel))));
    std::size_t i = 0;
    while (i < segment.params.size()) {
      const int first = segment.params[i];
      const Role& role = role_of(kind_.tensors[at(first)]);
      layout::Interval box = kind_.plan.image_interval(first);
      std::size_t n = 1;
      for (; i + n < segment.params.size(); ++n) {
        const int next = segment.params[i + n];
        const layout::Interval more = kind_.plan.image_interval(next);
        const bool narrow = static_cast<double>(more.size()) * scale_ < 3;
        const bool near = static_cast<double>(more.begin - box.end) * scale_ < 0.3;
        if (!narrow || !near || &role_of(kind_.tensors[at(next)]) != &role) break;
        box.end = std::max(box.end, more.end);
      }
      std::string title =
          fmt::format("{} [{}]", kind_.tensors[at(first)].name, fmt::join(kind_.tensors[at(first)].shape, ", "));
      if (n > 1) title += fmt::format(" and {} more", n - 1);
      const double x = x_of(box.begin);
      const double width = static_cast<double>(box.size()) * scale_;
      svg_.rect(x, y_, std::max(0.2, width - (width > 2 ? 0.5 : 0.0)), kBarHeight, role.colour, title);
      i += n;
    }
  }

  void draw_borders(const Segment& segment) {
    std::string path;
    double last = x_of(segment.image_offset);
    const double end = x_of(segment.image_offset + segment.numel);
    for (const layout::Interval& owner : segment.owners) {
      const double x = x_of(owner.begin);
      if (owner.empty() || x - last < kBorderGap || end - x < kBorderGap / 2) continue;
      path += fmt::format("M{:.5g} {:.5g}v{:.0f}", x, y_ - 3, kBarHeight + 6);
      last = x;
    }
    if (!path.empty()) svg_.path(path, "none", "#000", 0.4);
  }

  Svg& svg_;
  const UnitKind& kind_;
  double y_;
  double scale_;
};

}  // namespace

std::string plan_svg(const ModelPlan& plan) {
  Svg svg(kWidth, kTop + kRowHeight * static_cast<double>(plan.kinds.size()) + 10);
  svg.text(
      kLeft, 24,
      fmt::format(
          "{} on {} ranks, {} rows a block: padding {}", plan.model, grouped(plan.request.ranks),
          plan.request.policy.rows, percent_text(plan.padding_fraction())),
      "t");
  double x = kLeft;
  const auto legend = [&](std::string_view name, std::string_view colour) {
    svg.rect(x, 36, 12, 12, colour);
    svg.text(x + 16, 46, name);
    x += 40 + 7.0 * static_cast<double>(name.size());
  };
  for (const Role& role : kRoles) legend(role.name, role.colour);
  legend("padding", kPadding);
  svg.text(x, 46, "thin lines: borders between ranks, as many as there is room for");
  double y = kTop;
  for (const UnitKind& kind : plan.kinds) {
    svg.text(
        kLeft, y,
        fmt::format(
            "{} ({} of them): {} parameters, padding {}", kind.name, kind.count, grouped(kind.numel),
            percent_text(
                static_cast<double>(kind.plan.padding()) / static_cast<double>(std::max<Index>(1, kind.numel)))));
    Bar(svg, kind, y + 14).draw();
    y += kRowHeight;
  }
  return std::move(svg).finish();
}

}  // namespace ragged::sim
