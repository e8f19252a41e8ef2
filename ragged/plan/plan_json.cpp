#include "ragged/plan/plan_json.h"

#include <limits>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "ragged/plan/json_reader.h"

namespace ragged::plan {
namespace {

using Json = nlohmann::ordered_json;
using Node = detail::JsonNode;

constexpr std::string_view kOperation = "plan_from_json";

// A few bytes of text may name a huge group, whose owners would be allocated before anything could
// be checked.
constexpr Index kMaxWorldSize = Index{1} << 20;
constexpr Index kMaxOwners = Index{1} << 24;
// A plan has six levels.
constexpr int kMaxDepth = 16;

constexpr std::pair<SegmentKind, std::string_view> kKinds[] = {
    {SegmentKind::kUniform, "uniform"},
    {SegmentKind::kRagged, "ragged"},
    {SegmentKind::kOpaque, "opaque"},
};

std::string_view kind_name(SegmentKind kind) {
  for (const auto& [value, name] : kKinds) {
    if (value == kind) return name;
  }
  RAGGED_ASSERT(false, "unknown kind of segment");
  return {};
}

Json write(const ParamSpec& param, Index start) {
  return {{"name", param.name},       {"shape", param.shape},         {"block", param.block},
          {"restart", param.restart}, {"trainable", param.trainable}, {"start", start}};
}

Json write(const Segment& segment) {
  Json json{{"kind", kind_name(segment.kind)},  {"image_offset", segment.image_offset}, {"numel", segment.numel},
            {"shard_size", segment.shard_size}, {"trainable", segment.trainable},       {"params", segment.params}};
  // Of a uniform segment they follow from the shard size, and a thousand ranks' would swamp the
  // file.
  if (segment.kind != SegmentKind::kUniform) {
    Json owners = Json::array();
    for (const Interval& own : segment.owners) owners.push_back({own.begin, own.end});
    json["owners"] = std::move(owners);
  }
  return json;
}

void read_param(const Node& node, BucketPlan& plan) {
  node.expect_object(6);
  ParamSpec param{
      .name = node.member("name").string(),
      .block = node.member("block").integer(1),
      .restart = node.member("restart").integer(),
      .trainable = node.member("trainable").boolean()};
  const Node shape = node.member("shape");
  for (std::size_t i = 0; i < shape.array_size(); ++i) {
    param.shape.push_back(shape.element(i).integer());
  }
  plan.starts.push_back(node.member("start").integer());
  plan.params.push_back(std::move(param));
}

SegmentKind read_kind(const Node& node) {
  const std::string text = node.string();
  for (const auto& [value, name] : kKinds) {
    if (name == text) return value;
  }
  RAGGED_CHECK(
      false, "[plan_from_json] Expected one of 'uniform', 'ragged', 'opaque' at {}, but got '{}'.", node.path(), text);
  return SegmentKind::kUniform;
}

std::vector<Interval> read_owners(const Node& node, int world_size) {
  RAGGED_CHECK(
      node.array_size() == static_cast<std::size_t>(world_size),
      "[plan_from_json] Expected {} intervals at {}, one a rank, but got {}.", world_size, node.path(),
      node.array_size());
  std::vector<Interval> owners;
  for (std::size_t i = 0; i < node.array_size(); ++i) {
    const Node own = node.element(i);
    RAGGED_CHECK(
        own.array_size() == 2, "[plan_from_json] Expected two integers at {}, but got {} values.", own.path(),
        own.array_size());
    owners.push_back({own.element(0).integer(), own.element(1).integer()});
  }
  return owners;
}

std::vector<Interval> uniform_owners(const Node& node, const Segment& segment, int world_size) {
  const Index limit = (std::numeric_limits<Index>::max() - segment.image_offset) / world_size;
  RAGGED_CHECK(
      segment.shard_size <= limit, "[plan_from_json] Expected a shard size of at most {} at {}, but got {}.", limit,
      node.path(), segment.shard_size);
  std::vector<Interval> owners;
  for (Index rank = 0; rank < world_size; ++rank) {
    const Index begin = segment.image_offset + rank * segment.shard_size;
    owners.push_back({begin, begin + segment.shard_size});
  }
  return owners;
}

Segment read_segment(const Node& node, int world_size, std::size_t num_params) {
  Segment segment{.kind = read_kind(node.member("kind"))};
  const bool is_uniform = segment.kind == SegmentKind::kUniform;
  node.expect_object(is_uniform ? 6 : 7);
  segment.image_offset = node.member("image_offset").integer();
  segment.numel = node.member("numel").integer();
  segment.shard_size = node.member("shard_size").integer();
  segment.trainable = node.member("trainable").boolean();
  const Node params = node.member("params");
  for (std::size_t i = 0; i < params.array_size(); ++i) {
    const Index last = static_cast<Index>(num_params) - 1;
    segment.params.push_back(static_cast<int>(params.element(i).integer(0, last)));
  }
  segment.owners =
      is_uniform ? uniform_owners(node, segment, world_size) : read_owners(node.member("owners"), world_size);
  return segment;
}

BucketPlan read_plan(const Node& node) {
  const Index format = node.member("format").integer();
  RAGGED_CHECK(
      format == BucketPlan::kFormat,
      "[plan_from_json] Expected format {}, but got {}. Write the plan again with this version.", BucketPlan::kFormat,
      format);
  node.expect_object(7);
  BucketPlan plan;
  plan.world_size = static_cast<int>(node.member("world_size").integer(1, kMaxWorldSize));
  plan.collective_unit = node.member("collective_unit").integer(1);
  plan.start_alignment = node.member("start_alignment").integer(1);
  plan.lower_bound = node.member("lower_bound").integer();

  const Node params = node.member("params");
  RAGGED_CHECK(
      params.array_size() <= static_cast<std::size_t>(std::numeric_limits<int>::max()),
      "[plan_from_json] Expected fewer than 2^31 parameters, but got {}.", params.array_size());
  for (std::size_t i = 0; i < params.array_size(); ++i) read_param(params.element(i), plan);

  const Node segments = node.member("segments");
  RAGGED_CHECK(
      segments.array_size() <= static_cast<std::size_t>(kMaxOwners / plan.world_size),
      "[plan_from_json] Expected at most {} segments for {} ranks, but got {}.", kMaxOwners / plan.world_size,
      plan.world_size, segments.array_size());
  for (std::size_t i = 0; i < segments.array_size(); ++i) {
    plan.segments.push_back(read_segment(segments.element(i), plan.world_size, plan.params.size()));
  }
  return plan;
}

}  // namespace

std::string to_json(const BucketPlan& plan) {
  Json json{
      {"format", BucketPlan::kFormat},
      {"world_size", plan.world_size},
      {"collective_unit", plan.collective_unit},
      {"start_alignment", plan.start_alignment},
      {"lower_bound", plan.lower_bound}};
  RAGGED_CHECK(
      plan.starts.size() == plan.params.size(), "[to_json] Expected {} starts, one a parameter, but got {}.",
      plan.params.size(), plan.starts.size());
  Json params = Json::array();
  for (std::size_t i = 0; i < plan.params.size(); ++i) {
    params.push_back(write(plan.params[i], plan.starts[i]));
  }
  Json segments = Json::array();
  for (const Segment& segment : plan.segments) segments.push_back(write(segment));
  json["params"] = std::move(params);
  json["segments"] = std::move(segments);
  try {
    return json.dump(2);
  } catch (const Json::exception& error) {
    RAGGED_CHECK(false, "[to_json] Expected parameter names in UTF-8, but got bytes that aren't ({}).", error.what());
  }
  return {};
}

BucketPlan plan_from_json(std::string_view text) {
  const Json json = detail::parse_json(text, kMaxDepth, kOperation);
  BucketPlan plan = read_plan(Node(json, "plan", kOperation));
  validate(plan);
  return plan;
}

}  // namespace ragged::plan
