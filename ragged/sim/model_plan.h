// A whole model planned: one bucket plan a kind of unit, and what they sum to.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ragged/plan/planner.h"
#include "ragged/sim/model_source.h"

namespace ragged::sim {

struct LayoutRequest {
  int ranks = 1;  // that share one copy of the model
  plan::RowPolicy policy{};
  int layers_per_bucket = 1;
  Index ragged_blocks = -1;  // most blocks of a bucket that may travel ragged; -1: the planner's default
  plan::PlanStrategy strategy = plan::PlanStrategy::kAuto;
  bool with_bounds = true;  // also search what could be reached: takes as long again
  Index collective_unit = 8;
  bool with_soap = false;  // deal SOAP's states out once, for many questions about its bytes
};

/// Units that are alike, and the plan of one of them.
struct UnitKind {
  std::string name{};
  int count = 1;
  bool is_layer = false;
  int layers = 1;  // in one bucket
  std::vector<plan::InventoryTensor> tensors{};
  plan::BucketPlan plan{};
  plan::PlanReport report{};  // with_bounds only
  Index numel = 0;
  Index blocks_cut = 0;  // counted, not presumed
  Index boxes = 0;       // n-dimensional boxes that all ranks together would write into a checkpoint

  /// Collectives of one gather: one a segment that has elements.
  int collectives() const;
};

struct ModelPlan {
  std::string model{};
  LayoutRequest request{};
  ModelFacts facts{};
  std::vector<UnitKind> kinds{};
  std::vector<int> unit_kinds{};  // by unit, in the model's order: its index in `kinds`
  std::vector<std::string> unit_names{};
  Index numel = 0;
  Index padding = 0;        // of one image of everything, in elements like the next three
  Index lower_bound = 0;    // of that, whatever the layout allowed by the request
  Index packing_bound = 0;  // of that with equal shards alone
  Index uniform_only = 0;   // the least reached with equal shards alone
  Index blocks_cut = 0;
  Index boxes = 0;
  int collectives = 0;        // of one gather of everything
  double seconds = 0;         // that planning took
  std::vector<Index> load{};  // rank -> elements of its shards, padding included
  std::vector<std::string> remarks{};
  std::optional<double> soap_bytes{};  // with_soap only

  Index largest_load() const;
  /// Of the parameters.
  double fraction(Index padding_elements) const;
  double padding_fraction() const { return fraction(padding); }
  double lower_bound_fraction() const { return fraction(lower_bound); }
  /// Largest rank over the mean of what belongs to parameters.
  double largest_over_mean() const;
};

/// Throws InvalidArgument for fewer than one rank, row or layer, or no parameters.
ModelPlan plan_model(const Model& model, const LayoutRequest& request);

enum class Optimizer { kAdamW, kAdamWBf16, kAdamW8bit, kMuon, kSoap, kSgd };
inline constexpr Optimizer kAllOptimizers[] = {Optimizer::kAdamW, Optimizer::kAdamWBf16, Optimizer::kAdamW8bit,
                                               Optimizer::kMuon,  Optimizer::kSoap,      Optimizer::kSgd};
std::string_view name(Optimizer optimizer);
Optimizer parse_optimizer(std::string_view text);
/// Bytes an element of optimizer states; `is_matrix`: of a tensor that the matrix optimizers take. SOAP's depend on the
/// shape: of square matrices with both bases.
double state_bytes(Optimizer optimizer, bool is_matrix);
/// Whether Muon and SOAP take it: hidden matrices and stacks of them.
bool is_hidden_matrix(const plan::InventoryTensor& tensor);

/// Of the fullest rank; of SOAP soap_bytes().
double optimizer_bytes(const ModelPlan& plan, Optimizer optimizer);
/// Bytes of the states of each rank with SOAP, whose own lie whole on the roots that its step will choose
/// ([Note: owner state] in ragged/optim/soap_plan.h), and AdamW for the rest.
std::vector<double> soap_bytes(const ModelPlan& plan);

}  // namespace ragged::sim
