#include "ragged/sim/plan_report.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "ragged/sim/text.h"

namespace ragged::sim {
namespace {

using plan::Segment;
using plan::SegmentKind;

double fraction(Index part, Index whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

// "3 + 12 ragged tensors": uniform segments, and how much left them.
std::string segments_text(const UnitKind& kind) {
  int uniform = 0;
  std::size_t ragged = 0;
  for (const Segment& segment : kind.plan.segments) {
    if (segment.kind == SegmentKind::kUniform) {
      uniform += segment.numel > 0 ? 1 : 0;
    } else {
      ragged += segment.params.size();
    }
  }
  return ragged == 0 ? fmt::format("{}", uniform) : fmt::format("{} + {} ragged", uniform, ragged);
}

// One shard size a uniform segment.
std::string shards_text(const UnitKind& kind) {
  std::string text;
  for (const Segment& segment : kind.plan.segments) {
    if (segment.kind != SegmentKind::kUniform || segment.numel == 0) continue;
    if (!text.empty()) text += " + ";
    text += grouped(segment.shard_size);
  }
  return text.empty() ? "-" : text;
}

std::string request_text(const ModelPlan& plan) {
  const LayoutRequest& request = plan.request;
  std::string text = fmt::format(
      "{}: {} parameters on {} ranks, {} row{} a block{}", plan.model, grouped(plan.numel), grouped(request.ranks),
      request.policy.rows, request.policy.rows == 1 ? "" : "s", request.policy.flat ? " (over flattened rows)" : "");
  if (request.layers_per_bucket > 1) text += fmt::format(", {} layers a bucket", request.layers_per_bucket);
  if (request.ragged_blocks >= 0) text += fmt::format(", up to {} ragged blocks a bucket", request.ragged_blocks);
  return text;
}

nlohmann::ordered_json unit_json(const UnitKind& kind) {
  nlohmann::ordered_json segments = nlohmann::ordered_json::array();
  for (const Segment& segment : kind.plan.segments) {
    segments.push_back(
        {{"kind", to_string(segment.kind)},
         {"shard_size", segment.shard_size},
         {"numel", segment.numel},
         {"tensors", segment.params.size()}});
  }
  return {
      {"name", kind.name},
      {"count", kind.count},
      {"layers", kind.layers},
      {"parameters", kind.numel},
      {"tensors", kind.tensors.size()},
      {"padding", fraction(kind.plan.padding(), kind.numel)},
      {"lower_bound", fraction(kind.report.bound - kind.numel, kind.numel)},
      {"packing_bound", fraction(kind.report.uniform_bound - kind.numel, kind.numel)},
      {"uniform_only", fraction(kind.report.uniform_only - kind.numel, kind.numel)},
      {"blocks_cut", kind.blocks_cut},
      {"collectives", kind.collectives()},
      {"boxes", kind.boxes},
      {"segments", std::move(segments)}};
}

}  // namespace

std::vector<EngineLayout> compare(const ModelPlan& plan) {
  EngineLayout ours{.title = "RaggedFSDP", .key = "ragged"};
  ours.padding = plan.padding_fraction();
  ours.blocks_cut = plan.blocks_cut;
  ours.collectives = plan.collectives;
  ours.gathered = plan.numel + plan.padding;
  ours.reduce_written = plan.numel;  // each gradient into its slot, cast on the way
  std::vector<EngineLayout> engines{std::move(ours)};
  for (const Peer peer : kAllPeers) {
    EngineLayout engine{.title = std::string(title(peer)), .key = std::string(key(peer))};
    Index padding = 0;
    for (const UnitKind& kind : plan.kinds) {
      const PeerOptions options{.ranks = plan.request.ranks, .start_alignment = plan.request.collective_unit};
      const PeerLayout layout = peer_layout(peer, kind.plan.params, options);
      padding += kind.count * layout.padding;
      engine.gathered += kind.count * layout.size;
      engine.blocks_cut += kind.count * layout.blocks_cut;
      engine.collectives += kind.count * layout.groups;
      engine.gather_copied += kind.count * layout.gather_copied;
      engine.reduce_written += kind.count * layout.reduce_written;
      engine.replicated += kind.count * layout.replicated;
    }
    engine.padding = fraction(padding, plan.numel);
    engines.push_back(std::move(engine));
  }
  return engines;
}

std::string plan_text(const ModelPlan& plan, bool colour, bool with_time) {
  std::string text = bold(request_text(plan), colour) + "\n\n";
  Table table(
      {"unit", "x", "parameters", "segments", "elements a rank", "padding", "without ragged", "lower bound",
       "blocks cut", "collectives"});
  for (const UnitKind& kind : plan.kinds) {
    table.add(
        {kind.name, grouped(kind.count), grouped(kind.numel), segments_text(kind), shards_text(kind),
         percent_text(fraction(kind.plan.padding(), kind.numel)),
         percent_text(fraction(kind.report.uniform_only - kind.numel, kind.numel)),
         percent_text(fraction(kind.report.bound - kind.numel, kind.numel)), grouped(kind.blocks_cut),
         grouped(kind.collectives())});
  }
  table.rule();
  table.add(
      {"all", grouped(static_cast<Index>(plan.unit_kinds.size())), grouped(plan.numel), "", "",
       percent_text(plan.padding_fraction()), percent_text(plan.fraction(plan.uniform_only)),
       percent_text(plan.lower_bound_fraction()), grouped(plan.blocks_cut), grouped(plan.collectives)});
  text += table.to_string(colour) + "\n";

  const auto load = static_cast<double>(plan.largest_load());
  text += bold("bytes of the fullest rank", colour) + "\n";
  Table bytes({"  parameters, fp32", bytes_text(4 * load)});
  bytes.add({"  gradients, fp32", bytes_text(4 * load)});
  for (const Optimizer optimizer : kAllOptimizers) {
    if (optimizer == Optimizer::kSgd) continue;
    bytes.add({fmt::format("  states of {}", name(optimizer)), bytes_text(optimizer_bytes(plan, optimizer))});
  }
  text += bytes.to_string(false);
  text += fmt::format(
      "largest rank over the mean: {:.4f}; packing bound of equal shards: {}\n", plan.largest_over_mean(),
      percent_text(plan.fraction(plan.packing_bound)));
  text += fmt::format("boxes in a checkpoint: {}\n", grouped(plan.boxes));
  if (with_time) text += fmt::format("planned in {}\n", seconds_text(plan.seconds));
  if (!plan.remarks.empty()) text += "\n";
  for (const std::string& remark : plan.remarks) text += fmt::format("note: {}\n", remark);
  return text;
}

std::string compare_text(const std::vector<EngineLayout>& engines, bool colour) {
  Table table(
      {"layout", "padding", "blocks cut", "collectives", "gathered (bf16)", "copied around it", "into reduce buffers",
       "kept by all"});
  for (const EngineLayout& engine : engines) {
    const auto bf16 = [](Index elements) {
      return elements == 0 ? "-" : bytes_text(2.0 * static_cast<double>(elements));
    };
    table.add(
        {engine.title, percent_text(engine.padding), grouped(engine.blocks_cut), grouped(engine.collectives),
         bf16(engine.gathered), bf16(engine.gather_copied), bf16(engine.reduce_written), bf16(engine.replicated)});
  }
  return table.to_string(colour) +
      "By the public padding rules of each, for the same units; one gather of the whole model. Megatron-FSDP v1 and "
      "v2\n"
      "split experts from the rest. \"Into reduce buffers\": what autograd's gradients cost on the way, casts "
      "included.\n";
}

std::string plan_json(const ModelPlan& plan, const std::vector<EngineLayout>& engines) {
  const auto load = static_cast<double>(plan.largest_load());
  nlohmann::ordered_json optimizer;
  for (const Optimizer kind : kAllOptimizers)
    optimizer[std::string(name(kind))] = std::llround(optimizer_bytes(plan, kind));
  nlohmann::ordered_json json = {
      {"format", 1},
      {"model", plan.model},
      {"ranks", plan.request.ranks},
      {"rows", plan.request.policy.rows},
      {"flat_rows", plan.request.policy.flat},
      {"layers_per_bucket", plan.request.layers_per_bucket},
      {"ragged_blocks", plan.request.ragged_blocks},
      {"parameters", plan.numel},
      {"padding", plan.padding_fraction()},
      {"lower_bound", plan.lower_bound_fraction()},
      {"packing_bound", plan.fraction(plan.packing_bound)},
      {"uniform_only", plan.fraction(plan.uniform_only)},
      {"blocks_cut", plan.blocks_cut},
      {"collectives", plan.collectives},
      {"boxes", plan.boxes},
      {"largest_over_mean", plan.largest_over_mean()},
      {"seconds", plan.seconds},
      {"bytes_per_rank",
       {{"parameters", std::llround(4 * load)}, {"gradients", std::llround(4 * load)}, {"optimizer", optimizer}}},
      {"remarks", plan.remarks}};
  nlohmann::ordered_json& units = json["units"] = nlohmann::ordered_json::array();
  for (const UnitKind& kind : plan.kinds) units.push_back(unit_json(kind));
  if (engines.empty()) return json.dump(2);
  nlohmann::ordered_json& compared = json["compare"] = nlohmann::ordered_json::array();
  for (const EngineLayout& engine : engines) {
    compared.push_back(
        {{"engine", engine.key},
         {"padding", engine.padding},
         {"blocks_cut", engine.blocks_cut},
         {"collectives", engine.collectives},
         {"gathered", engine.gathered},
         {"gather_copied", engine.gather_copied},
         {"reduce_written", engine.reduce_written},
         {"replicated", engine.replicated}});
  }
  return json.dump(2);
}

}  // namespace ragged::sim
