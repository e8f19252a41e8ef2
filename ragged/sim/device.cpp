#include "ragged/sim/device.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "ragged/plan/json_reader.h"
#include "ragged/sim/model_source.h"

namespace ragged::sim {
namespace {

constexpr std::uint64_t kMaxFile = 1 << 20;
constexpr int kMaxDepth = 4;

std::vector<Device> presets() {
  const Device h100;
  Device h200 = h100;
  h200.name = "h200";
  h200.memory = 141e9;
  h200.memory_bandwidth = 4.8e12;
  Device h800 = h100;
  h800.name = "h800";
  h800.node_bandwidth = 200e9;
  Device a100 = h100;
  a100.name = "a100";
  a100.flops = 312e12;
  a100.memory_bandwidth = 2.0e12;
  a100.node_bandwidth = 300e9;
  a100.network_bandwidth = 25e9;
  // A process on a shared host: everything passes through memory.
  const Device cpu{
      .name = "cpu",
      .flops = 100e9,
      .memory = 16e9,
      .memory_bandwidth = 10e9,
      .ranks_per_node = 1 << 20,
      .node_bandwidth = 1e9,
      .network_bandwidth = 1e9,
      .latency = 200e-6,
      .sums_after_transfer = true};
  return {a100, cpu, h100, h200, h800};
}

struct Field {
  const char* name;
  double Device::*value;
};
constexpr Field kFields[] = {
    {"flops", &Device::flops},
    {"flops_efficiency", &Device::flops_efficiency},
    {"memory", &Device::memory},
    {"memory_bandwidth", &Device::memory_bandwidth},
    {"node_bandwidth", &Device::node_bandwidth},
    {"network_bandwidth", &Device::network_bandwidth},
    {"bandwidth_efficiency", &Device::bandwidth_efficiency},
    {"latency", &Device::latency},
    {"hop_latency", &Device::hop_latency}};

Device preset(const std::string& name) {
  for (const Device& device : presets()) {
    if (device.name == name) return device;
  }
  const std::string near = nearest(name, device_names());
  RAGGED_CHECK(
      false, "[device] Expected one of {} or a JSON file, but got '{}'.{}", fmt::join(device_names(), ", "), name,
      near.empty() ? "" : fmt::format(" Did you mean '{}'?", near));
  return {};
}

}  // namespace

std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (const Device& device : presets()) names.push_back(device.name);
  return names;
}

Device load_device(const std::string& source) {
  const std::vector<std::string> names = device_names();
  if (std::ranges::find(names, source) == names.end() && std::filesystem::is_regular_file(source)) {
    return device_from_json(read_text(source, kMaxFile, "device"), source);
  }
  return preset(source);
}

Device device_from_json(std::string_view text, std::string_view source) {
  nlohmann::ordered_json json;
  try {
    json = plan::detail::parse_json(text, kMaxDepth, "device");
  } catch (const InvalidArgument& error) {
    RAGGED_CHECK(false, "{} (file '{}')", error.what(), source);
  }
  RAGGED_CHECK(json.is_object(), "[device] Expected a JSON object, but got something else ('{}').", source);
  const bool has_base = json.contains("base") && json["base"].is_string();
  Device device = preset(has_base ? json["base"].get<std::string>() : Device{}.name);
  device.name = std::filesystem::path(source).stem().string();
  for (const auto& [key, value] : json.items()) {
    if (key == "base") continue;
    if (key == "name" && value.is_string()) {
      device.name = value.get<std::string>();
      continue;
    }
    const auto field = std::ranges::find(kFields, key, &Field::name);
    if (field == std::end(kFields) && key != "ranks_per_node") {
      std::vector<std::string> names{"base", "name", "ranks_per_node"};
      for (const Field& known : kFields) names.emplace_back(known.name);
      const std::string near = nearest(key, names);
      RAGGED_CHECK(
          false, "[device] Expected one of {}, but got '{}' ('{}').{}", fmt::join(names, ", "), key, source,
          near.empty() ? "" : fmt::format(" Did you mean '{}'?", near));
    }
    const double number = value.is_number() ? value.get<double>() : 0.0;
    RAGGED_CHECK(
        number > 0 && std::isfinite(number), "[device] Expected a positive number, but got {} (key '{}', '{}').",
        value.dump(), key, source);
    if (key == "ranks_per_node") {
      RAGGED_CHECK(
          value.is_number_integer() && number <= 1 << 20,
          "[device] Expected a whole number of ranks, but got {} (key '{}', '{}').", value.dump(), key, source);
      device.ranks_per_node = value.get<Index>();
    } else {
      device.*(field->value) = number;
    }
  }
  return device;
}

double gather_seconds(const Device& device, double bytes, Index ranks, Index roots) {
  if (ranks <= 1 || bytes <= 0) return 0;
  const Index in_node = std::min(ranks, device.ranks_per_node);
  const Index nodes = ceil_div(ranks, device.ranks_per_node);
  const auto all_but = [](Index n) { return static_cast<double>(n - 1) / static_cast<double>(n); };
  // Every rank receives the image over its links in the node; a node receives it over all its links to others.
  const double within = bytes * all_but(ranks) / device.node_bandwidth;
  const double between = bytes * all_but(nodes) / (device.network_bandwidth * static_cast<double>(in_node));
  const double latency =
      device.latency * static_cast<double>(roots) + device.hop_latency * static_cast<double>(nodes - 1);
  return latency + std::max(within, between) / device.bandwidth_efficiency;
}

double all_reduce_seconds(const Device& device, double bytes, Index replicas, Index shard_ranks) {
  if (replicas <= 1 || bytes <= 0) return 0;
  const bool in_node = replicas * shard_ranks <= device.ranks_per_node;
  const double bandwidth = in_node ? device.node_bandwidth : device.network_bandwidth;
  const double share = static_cast<double>(replicas - 1) / static_cast<double>(replicas);
  return 2 * device.latency + device.hop_latency * static_cast<double>(replicas - 1) +
      2 * bytes * share / bandwidth / device.bandwidth_efficiency;
}

}  // namespace ragged::sim
