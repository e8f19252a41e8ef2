// The search behind `ragged tune`: ways to shard and run a model on so many ranks, what each costs in memory and time,
// and which one to take.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ragged/sim/step.h"

namespace ragged::sim {

struct TuneRequest {
  int ranks = 1;                 // in all
  plan::RowPolicy policy{};      // blocks that are wanted
  Index ragged_blocks = -1;      // as in LayoutRequest
  StepRequest step{};            // device, tokens, checkpointing; `optimizer` is preferred
  double memory = 0;             // bytes a rank may take; 0: 90 % of the device's
  bool fixed_optimizer = false;  // search no other
};

/// One way, and what it costs.
struct TunePoint {
  int shard = 1;
  int replicas = 1;
  Index rows = 1;
  int layers_per_bucket = 1;
  bool reshard_after_forward = true;
  int prefetch = 1;
  Optimizer optimizer = Optimizer::kAdamW;
  double padding = 0;
  double memory = 0;
  double seconds = 0;
};

/// Padding by group size, for one, two and four layers a bucket; negative where it wasn't planned.
struct GroupRow {
  int shard = 1;
  double padding[3] = {-1, -1, -1};
  double held = 0;  // bytes of parameters, gradients and states of the preferred optimizer, one layer a bucket
};
inline constexpr int kTunedLayers[3] = {1, 2, 4};

struct TuneResult {
  double memory = 0;               // the limit that held
  std::vector<TunePoint> front{};  // of those that fit, if any: ascending in time, descending in memory
  TunePoint best{};
  bool fits = false;
  std::vector<std::string> reasons{};     // in words, for `best`
  std::vector<GroupRow> groups{};         // ascending
  std::vector<std::string> neighbours{};  // other numbers of ranks that are far better or worse
  int tried = 0;
};

/// Throws InvalidArgument as plan_model and simulate_step do.
TuneResult tune(const Model& model, const TuneRequest& request);

std::string tune_text(const Model& model, const TuneRequest& request, const TuneResult& result, bool colour);
std::string tune_json(const Model& model, const TuneRequest& request, const TuneResult& result);

}  // namespace ragged::sim
