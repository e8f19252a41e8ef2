// What the cost model knows of a machine: a handful of rates. Presets are data sheets; efficiencies are assumptions
// that the reports state.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ragged/base/math.h"

namespace ragged::sim {

struct Device {
  std::string name = "h100";
  double flops = 989e12;              // a second, dense bf16
  double flops_efficiency = 0.5;      // of that in matrix products, attention and the rest included
  double memory = 80e9;               // bytes
  double memory_bandwidth = 3.35e12;  // bytes a second
  Index ranks_per_node = 8;
  double node_bandwidth = 450e9;       // bytes a second and rank, one way, within a node
  double network_bandwidth = 50e9;     // the same between nodes
  double bandwidth_efficiency = 0.72;  // of both, in collectives
  double latency = 20e-6;              // seconds a collective
  double hop_latency = 3e-6;           // seconds for each further node in the ring
  /// Gradients travel in the dtype they were computed in, and are summed in the reductions' after that, as on Gloo. Of
  /// the preset "cpu" and of files over it.
  bool sums_after_transfer = false;
};

/// Names of the presets.
std::vector<std::string> device_names();

/// A preset's name, or a JSON file with fields of the same names as above over those of its "base" preset. Throws
/// InvalidArgument for an unknown name, an unknown field (with the nearest known one), or a value that isn't positive.
Device load_device(const std::string& source);
Device device_from_json(std::string_view text, std::string_view source);

/// Seconds of one all-gather to (or reduce-scatter from) an image of so many bytes, over ranks that fill node after
/// node; `roots` > 1: a group of that many broadcasts.
double gather_seconds(const Device& device, double bytes, Index ranks, Index roots = 1);
/// Seconds of an all-reduce of so many bytes a rank over replicas whose shard groups have `shard_ranks` ranks.
double all_reduce_seconds(const Device& device, double bytes, Index replicas, Index shard_ranks);

}  // namespace ragged::sim
