// One training step, computed: what is alive when, and when compute and network are busy. A walk over the units in
// the order in which a transformer runs them; no tensors.
//
// [Note: cost model]
// Compute: 2 x tokens x matrix elements in forward and twice that in backward (once more where activations are
// recomputed), experts by the share that a token uses, and causal attention; at least the time to read the weights.
// Collectives: see device.h; gathers, reductions and the all-reduce over replicas share one network, in the order of
// the issue list (AG n, AG n-1, RS n, AG n-2, ...). A unit's gather may start when the unit `prefetch` + 1 places
// before it is done, for then its slot is free; two reduce buffers at most are in flight.
// Activations of a layer: the input and the output of every matrix in bf16, an input that several share once, and two
// norms. Full checkpointing keeps the layer's input and has one layer's activations alive in backward. Logits take 2
// bytes and their gradient in fp32 4. Not counted: fragmentation, the backend's own buffers, the framework.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "ragged/sim/device.h"
#include "ragged/sim/model_plan.h"

namespace ragged::sim {

enum class Checkpointing { kNone, kFull };

struct StepRequest {
  Device device{};
  Index tokens = 8192;  // a rank and step
  Index sequence = 0;   // tokens that attend to each other; 0: all of a rank's, at most 8,192
  int replicas = 1;     // groups of ranks that hold a copy each (HSDP)
  Optimizer optimizer = Optimizer::kAdamW;
  Checkpointing checkpointing = Checkpointing::kFull;
  bool reshard_after_forward = true;
  int prefetch = 1;         // units gathered ahead, in both directions
  double param_bytes = 2;   // an element of images
  double reduce_bytes = 4;  // an element of reduce buffers
};

/// What memory is for. The order is that of stacked pictures, from the bottom.
enum class Use { kParameters, kOptimizer, kGradients, kActivations, kImages, kReduce };
inline constexpr int kNumUses = 6;
std::string_view title(Use use);
std::string_view key(Use use);

using Bytes = std::array<double, kNumUses>;
double sum(const Bytes& bytes);

enum class Lane { kCompute, kNetwork };

struct StepSpan {
  std::string name{};  // "forward model.layers.3"
  Lane lane = Lane::kCompute;
  double begin = 0;
  double end = 0;
};

struct MemoryPoint {
  double time = 0;
  Bytes bytes{};  // from this time on
};

struct StepResult {
  std::vector<StepSpan> spans{};      // ascending by begin within a lane
  std::vector<MemoryPoint> memory{};  // ascending in time
  double seconds = 0;
  double compute_seconds = 0;  // busy
  double network_seconds = 0;
  double exposed_seconds = 0;  // compute waits for the network
  double gathered_bytes = 0;   // images, once a collective
  double reduced_bytes = 0;
  double flops = 0;  // the model's, without recomputation
  double mfu = 0;    // of the device's peak
  double peak = 0;
  double peak_time = 0;
  Bytes at_peak{};
  std::string peak_during{};  // "backward model.layers.3"
  double peak_images = 0;
  double peak_reduce = 0;
};

/// The plan's ranks are one shard group. Throws InvalidArgument for counts below 1 (prefetch: below 0).
StepResult simulate_step(const ModelPlan& plan, const StepRequest& request);

/// In words: what to turn to lower the peak, most effective first.
std::vector<std::string> advice(const ModelPlan& plan, const StepRequest& request, const StepResult& result);

}  // namespace ragged::sim
