// What stands behind MODEL on a command line: a bundled inventory, an inventory file, or the headers of safetensors
// files. Shapes only.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ragged/plan/inventory.h"
#include "ragged/sim/safetensors_header.h"

namespace ragged::sim {

/// What shapes don't tell and the cost of a step depends on; 0 where it isn't known.
struct ModelFacts {
  Index experts = 0;
  Index experts_per_token = 0;
  Index attention_width = 0;  // query heads x head dim
  friend bool operator==(const ModelFacts&, const ModelFacts&) = default;
};

struct Model {
  plan::Inventory inventory{};
  ModelFacts facts{};
  std::vector<std::string> remarks{};  // for people: what was guessed or is odd about the source
};

struct BundledModel {
  std::string_view name;
  std::string_view json;
};

/// The inventories of models/, built in; ascending by name.
std::span<const BundledModel> bundled_models();

/// `source`: a bundled name, or a path to an inventory, a .safetensors file, a safetensors index, or a folder that has
/// one of the latter. Throws InvalidArgument; for an unknown name with the nearest known one.
Model load_model(const std::string& source, const plan::InventoryOptions& options = {});

/// Wrap units from names alone: a numbered module ("model.layers.3") is a unit, embeddings are one, the rest is one.
Model model_from_tensors(std::string name, std::span<const StoredTensor> tensors);

/// The facts in an inventory's (or a Hugging Face model's) config, as far as they are there.
ModelFacts facts_from_json(std::string_view text);

/// The candidate that fewest edits away is; empty when none is near.
std::string nearest(std::string_view word, std::span<const std::string> candidates);

}  // namespace ragged::sim
