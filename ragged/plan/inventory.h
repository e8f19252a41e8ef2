// The parameters of a model as names and shapes, without weights: what the planner and the tools
// that answer before a launch start from. The files in models/ are inventories; their README has
// the format.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ragged/plan/bucket_plan.h"

namespace ragged::plan {

struct InventoryTensor {
  std::string name{};  // in full: "model.layers.3.mlp.gate.weight"
  std::vector<Index> shape{};
  std::string kind{};   // "matrix", "vector", "embedding", "expert_fused" (dim 0 is the expert)
  std::string role{};   // "attn", "norm", ...; see models/README.md
  std::string dtype{};  // as in the file: "bfloat16", "float32"

  Index numel() const { return checked_product(shape); }
  friend bool operator==(const InventoryTensor&, const InventoryTensor&) = default;
};

/// One wrap unit: the tensors of one bucket, in registration order.
struct InventoryUnit {
  std::string name{};  // "model.layers.3"
  std::string kind{};  // units of one kind are alike but for names: "model.layers.3-60", "embed"
  bool is_layer = false;
  std::vector<InventoryTensor> tensors{};

  Index numel() const;
  friend bool operator==(const InventoryUnit&, const InventoryUnit&) = default;
};

struct Inventory {
  std::string name{};
  std::vector<InventoryUnit> units{};

  Index numel() const;
  friend bool operator==(const Inventory&, const Inventory&) = default;
};

struct InventoryOptions {
  bool with_optional = false;  // units that the file marks as optional, like a multi-token head
};

/// Throws InvalidArgument, saying where, for text that isn't an inventory: names that occur twice,
/// negative sizes, shapes that don't sum to the stated total, more than 2^22 tensors.
Inventory inventory_from_json(std::string_view text, const InventoryOptions& options = {});

/// Puts up to `layers_per_bucket` consecutive layers of one kind into one unit.
Inventory merge_layers(const Inventory& inventory, int layers_per_bucket);

struct RowPolicy {
  Index rows = 1;     // a block of a matrix; as many as it has where it has fewer
  bool flat = false;  // blocks run over the rows of a stack of experts instead of restarting
};

/// What the planner sees of a unit: rows of matrices are blocks, vectors are cut anywhere, and a
/// matrix of one bias vector an expert (expert_fused in 2-D) only between experts.
std::vector<ParamSpec> param_specs(const InventoryUnit& unit, const RowPolicy& policy);

}  // namespace ragged::plan
