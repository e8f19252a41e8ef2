// The reports of tune.h.
#include <cmath>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "ragged/sim/text.h"
#include "ragged/sim/tune.h"

namespace ragged::sim {
namespace {

constexpr std::size_t kMostRows = 14;

std::vector<std::string> cells(const TunePoint& point) {
  return {
      seconds_text(point.seconds),
      bytes_text(point.memory),
      fmt::format("{} x {}", point.replicas, grouped(point.shard)),
      fmt::format("{}", point.rows),
      fmt::format("{}", point.layers_per_bucket),
      point.reshard_after_forward ? "yes" : "no",
      fmt::format("{}", point.prefetch),
      std::string(name(point.optimizer)),
      percent_text(point.padding)};
}

nlohmann::ordered_json point_json(const TunePoint& point) {
  return {
      {"shard", point.shard},
      {"replicas", point.replicas},
      {"rows", point.rows},
      {"layers_per_bucket", point.layers_per_bucket},
      {"reshard_after_forward", point.reshard_after_forward},
      {"prefetch", point.prefetch},
      {"optimizer", name(point.optimizer)},
      {"padding", point.padding},
      {"memory_bytes", std::llround(point.memory)},
      {"seconds", point.seconds}};
}

// Evenly over the front, both ends included.
std::vector<TunePoint> thinned(const std::vector<TunePoint>& front) {
  if (front.size() <= kMostRows) return front;
  std::vector<TunePoint> some;
  for (std::size_t i = 0; i < kMostRows; ++i) some.push_back(front[i * (front.size() - 1) / (kMostRows - 1)]);
  return some;
}

}  // namespace

std::string tune_text(const Model& model, const TuneRequest& request, const TuneResult& result, bool colour) {
  std::string text = bold(
      fmt::format(
          "{} on {} ranks of {}, {} a rank at most, {} tokens a rank", model.inventory.name, grouped(request.ranks),
          request.step.device.name, bytes_text(result.memory), grouped(request.step.tokens)),
      colour);
  const std::vector<TunePoint> shown = thinned(result.front);
  text += fmt::format(
      "\n{} ways tried; the best trades of time against memory ({} of {}):\n\n", grouped(result.tried), shown.size(),
      result.front.size());
  Table front({"step", "memory", "copies x shard", "rows", "layers", "reshard", "ahead", "optimizer", "padding"});
  for (const TunePoint& point : shown) front.add(cells(point));
  text += front.to_string(colour) + "\n";

  const TunePoint& best = result.best;
  text += bold(result.fits ? "recommended" : "nearest", colour) + "\n";
  Table one({"step", "memory", "copies x shard", "rows", "layers", "reshard", "ahead", "optimizer", "padding"});
  one.add(cells(best));
  text += one.to_string(false);
  for (const std::string& reason : result.reasons) text += "  " + reason + "\n";

  text += "\n" + bold("padding by group size", colour) + "\n";
  Table groups({"shard over", "1 layer a bucket", "2 layers", "4 layers", "held a rank"});
  for (const GroupRow& row : result.groups) {
    groups.add(
        {grouped(row.shard), percent_text(row.padding[0]), percent_text(row.padding[1]), percent_text(row.padding[2]),
         bytes_text(row.held)});
  }
  text += groups.to_string(false);
  for (const std::string& line : result.neighbours) text += "note: " + line + "\n";
  return text;
}

std::string tune_json(const Model& model, const TuneRequest& request, const TuneResult& result) {
  nlohmann::ordered_json front = nlohmann::ordered_json::array();
  for (const TunePoint& point : result.front) front.push_back(point_json(point));
  nlohmann::ordered_json groups = nlohmann::ordered_json::array();
  for (const GroupRow& row : result.groups) {
    nlohmann::ordered_json padding;
    for (int i = 0; i < 3; ++i) padding[fmt::format("{}", kTunedLayers[i])] = row.padding[i];
    groups.push_back({{"shard", row.shard}, {"padding", padding}, {"held_bytes", std::llround(row.held)}});
  }
  const nlohmann::ordered_json json = {
      {"format", 1},
      {"model", model.inventory.name},
      {"ranks", request.ranks},
      {"rows", request.policy.rows},
      {"device", request.step.device.name},
      {"tokens", request.step.tokens},
      {"memory_bytes", std::llround(result.memory)},
      {"fits", result.fits},
      {"tried", result.tried},
      {"recommended", point_json(result.best)},
      {"reasons", result.reasons},
      {"front", front},
      {"groups", groups},
      {"neighbours", result.neighbours}};
  return json.dump(2);
}

}  // namespace ragged::sim
