// What `ragged plan` shows of a planned model: a table, JSON with stable names, a picture.
#pragma once

#include <string>
#include <vector>

#include "ragged/sim/model_plan.h"
#include "ragged/sim/peers.h"

namespace ragged::sim {

/// One engine's layout of a whole model, for the comparison. Elements, of one image of everything.
struct EngineLayout {
  std::string title{};
  std::string key{};
  double padding = 0;  // fraction of the parameters
  Index blocks_cut = 0;
  int collectives = 0;       // of one gather of everything
  Index gathered = 0;        // elements
  Index gather_copied = 0;   // elements a rank writes around one gather beside the collective
  Index reduce_written = 0;  // elements a rank writes to bring gradients into place
  Index replicated = 0;      // elements kept in whole by ranks that don't own them
  friend bool operator==(const EngineLayout&, const EngineLayout&) = default;
};

/// Ours first, then the peers, each by its own rule for the same units.
std::vector<EngineLayout> compare(const ModelPlan& plan);

/// The table per kind of unit, totals and remarks. `with_time` false leaves out what differs between runs.
std::string plan_text(const ModelPlan& plan, bool colour, bool with_time = true);
std::string compare_text(const std::vector<EngineLayout>& engines, bool colour);
/// `engines` may be empty.
std::string plan_json(const ModelPlan& plan, const std::vector<EngineLayout>& engines);

/// The buckets drawn to scale, one bar a kind of unit: tensors coloured by role, borders between ranks, padding.
std::string plan_svg(const ModelPlan& plan);

}  // namespace ragged::sim
