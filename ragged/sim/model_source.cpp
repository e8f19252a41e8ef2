#include "ragged/sim/model_source.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "ragged/base/text.h"
#include "ragged/plan/json_reader.h"

namespace ragged::sim {
namespace {

namespace fs = std::filesystem;
using plan::Inventory;
using plan::InventoryTensor;
using plan::InventoryUnit;

constexpr std::uint64_t kMaxInventory = 64 << 20;
constexpr int kMaxConfigDepth = 32;

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

bool has_any(std::string_view text, std::initializer_list<std::string_view> parts) {
  return std::ranges::any_of(parts, [&](std::string_view part) { return has(text, part); });
}

std::string role_of(std::string_view name, std::size_t dims) {
  const bool is_bias = name.ends_with("bias");
  if (has(name, "shared_expert")) return "shared_expert";
  if (has(name, "experts")) return is_bias ? "expert_bias" : "expert";
  if (has_any(name, {"router", "mlp.gate.", "block_sparse_moe.gate."})) return is_bias ? "router_bias" : "router";
  if (has_any(name, {"norm", "ln_", ".ln"})) return "norm";
  if (has_any(name, {"embed", "wte", "wpe"})) return "embed";
  if (has_any(name, {"lm_head", "output.weight"}) && dims == 2) return "head";
  if (has_any(name, {"attn", "attention"})) return is_bias ? "attn_bias" : "attn";
  return is_bias ? "mlp_bias" : "mlp";
}

std::string kind_of(std::string_view name, std::string_view role, std::size_t dims) {
  if (dims < 2) return "vector";
  if (role == "embed") return "embedding";
  if (has(name, "experts") && (dims > 2 || role == "expert_bias")) return "expert_fused";
  return "matrix";
}

std::string dtype_of(std::string_view stored) {
  static const std::map<std::string_view, std::string> kNames = {
      {"BF16", "bfloat16"}, {"F16", "float16"}, {"F32", "float32"}, {"F64", "float64"}};
  const auto found = kNames.find(stored);
  return found == kNames.end() ? std::string(stored) : found->second;
}

struct LayerName {
  std::string family;  // "model.layers"
  Index number = 0;
};

// The outermost module with a number.
std::optional<LayerName> layer_of(std::string_view name) {
  std::size_t begin = 0;
  while (begin < name.size()) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    const bool is_number = !part.empty() && part.size() <= 9 && part.find_first_not_of("0123456789") == part.npos;
    if (is_number && begin > 0 && end < name.size()) {
      return LayerName{std::string(name.substr(0, begin - 1)), std::stoll(std::string(part))};
    }
    begin = end + 1;
  }
  return std::nullopt;
}

// "experts.10" after "experts.9".
bool natural_less(std::string_view a, std::string_view b) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  while (!a.empty() && !b.empty()) {
    if (is_digit(a[0]) && is_digit(b[0])) {
      const std::size_t na = std::min(a.find_first_not_of("0123456789"), a.size());
      const std::size_t nb = std::min(b.find_first_not_of("0123456789"), b.size());
      const std::string_view da = a.substr(0, na);
      const std::string_view db = b.substr(0, nb);
      if (da != db) return da.size() != db.size() ? da.size() < db.size() : da < db;
      a.remove_prefix(na);
      b.remove_prefix(nb);
    } else {
      if (a[0] != b[0]) return a[0] < b[0];
      a.remove_prefix(1);
      b.remove_prefix(1);
    }
  }
  return a.size() < b.size();
}

InventoryTensor inventory_tensor(const StoredTensor& stored) {
  InventoryTensor tensor{.name = stored.name, .shape = stored.shape, .dtype = dtype_of(stored.dtype)};
  tensor.role = role_of(stored.name, stored.shape.size());
  tensor.kind = kind_of(stored.name, tensor.role, stored.shape.size());
  return tensor;
}

// Layers with the same tensors are of one kind, called after the range that they make up.
void name_kinds(std::vector<InventoryUnit>& units, const std::map<std::string, LayerName>& layers) {
  std::map<std::string, std::vector<std::size_t>> alike;
  for (std::size_t i = 0; i < units.size(); ++i) {
    units[i].kind = units[i].name;
    if (!units[i].is_layer) continue;
    std::string signature = layers.at(units[i].name).family;
    for (const InventoryTensor& tensor : units[i].tensors) {
      signature += fmt::format("|{}{}", tensor.name.substr(units[i].name.size()), tensor.shape);
    }
    alike[signature].push_back(i);
  }
  for (const auto& [signature, members] : alike) {
    if (members.size() < 2) continue;
    const LayerName& first = layers.at(units[members.front()].name);
    const LayerName& last = layers.at(units[members.back()].name);
    for (const std::size_t i : members) {
      units[i].kind = fmt::format("{}.{}-{}", first.family, first.number, last.number);
    }
  }
}

Model load_file(const fs::path& path, const plan::InventoryOptions& options) {
  if (path.extension() == ".safetensors") return model_from_tensors(path.stem().string(), read_safetensors(path));
  if (path.string().ends_with(".index.json")) {
    return model_from_tensors(path.string(), read_safetensors_index(path));
  }
  const std::string text = read_text(path, kMaxInventory, "inventory");
  try {
    return {.inventory = plan::inventory_from_json(text, options), .facts = facts_from_json(text)};
  } catch (const InvalidArgument& error) {
    RAGGED_CHECK(false, "{} (file '{}')", error.what(), path.string());
  }
  return {};
}

}  // namespace

std::string nearest(std::string_view word, std::span<const std::string> candidates) {
  std::string best;
  std::size_t fewest = std::max<std::size_t>(3, word.size() / 2) + 1;
  for (const std::string& candidate : candidates) {
    // A beginning ("llama-3-8" or "gpt-oss-120b") is nearer than its length says.
    const bool begins = !word.empty() && candidate.starts_with(word);
    const std::size_t distance = begins ? 0 : edit_distance(word, candidate);
    if (distance < fewest) {
      fewest = distance;
      best = candidate;
    }
  }
  return best;
}

ModelFacts facts_from_json(std::string_view text) {
  nlohmann::ordered_json json;
  try {
    json = plan::detail::parse_json(text, kMaxConfigDepth, "model");
  } catch (const InvalidArgument&) {
    return {};  // what isn't known is left out of the estimate
  }
  if (!json.is_object()) return {};
  const nlohmann::ordered_json& config = json.contains("config") && json["config"].is_object() ? json["config"] : json;
  const auto number = [&](std::initializer_list<const char*> names) -> Index {
    for (const char* name : names) {
      if (!config.contains(name) || !config[name].is_number_integer()) continue;
      const auto value = config[name].get<std::int64_t>();
      if (value > 0 && value < (1 << 24)) return value;
    }
    return 0;
  };
  const Index heads = number({"num_heads", "num_attention_heads", "n_head"});
  const Index hidden = number({"hidden_size", "n_embd"});
  Index head_dim = number({"head_dim", "v_head_dim"});
  if (head_dim == 0 && heads > 0) head_dim = hidden / heads;
  return {
      .experts = number({"num_experts", "n_routed_experts", "num_local_experts"}),
      .experts_per_token = number({"experts_per_token", "num_experts_per_tok"}),
      .attention_width = heads * head_dim};
}

Model model_from_tensors(std::string name, std::span<const StoredTensor> tensors) {
  Model model;
  model.inventory.name = std::move(name);
  std::map<std::string, LayerName> layers;
  std::map<std::pair<std::string, Index>, InventoryUnit> by_layer;
  InventoryUnit embed{.name = "embed", .kind = "embed"};
  InventoryUnit rest{.name = "norm_head", .kind = "norm_head"};
  Index quantised = 0;
  for (const StoredTensor& stored : tensors) {
    if (!std::set<std::string>{"F64", "F32", "F16", "BF16"}.contains(stored.dtype)) ++quantised;
    InventoryTensor tensor = inventory_tensor(stored);
    if (const auto layer = layer_of(stored.name)) {
      InventoryUnit& unit = by_layer[{layer->family, layer->number}];
      unit.name = fmt::format("{}.{}", layer->family, layer->number);
      unit.is_layer = true;
      layers[unit.name] = *layer;
      unit.tensors.push_back(std::move(tensor));
    } else {
      (tensor.role == "embed" ? embed : rest).tensors.push_back(std::move(tensor));
    }
  }
  std::vector<InventoryUnit>& units = model.inventory.units;
  if (!embed.tensors.empty()) units.push_back(std::move(embed));
  for (auto& [layer, unit] : by_layer) units.push_back(std::move(unit));
  if (!rest.tensors.empty()) units.push_back(std::move(rest));
  for (InventoryUnit& unit : units) {
    std::ranges::stable_sort(unit.tensors, natural_less, &InventoryTensor::name);
  }
  name_kinds(units, layers);
  if (quantised > 0) {
    model.remarks.push_back(fmt::format(
        "{} tensors are stored in an integer or FP8 type: their shapes may be those of packed values, and scales count "
        "as parameters.",
        quantised));
  }
  return model;
}

Model load_model(const std::string& source, const plan::InventoryOptions& options) {
  std::vector<std::string> names;
  for (const BundledModel& bundled : bundled_models()) {
    names.emplace_back(bundled.name);
    if (bundled.name != source) continue;
    return {.inventory = plan::inventory_from_json(bundled.json, options), .facts = facts_from_json(bundled.json)};
  }
  fs::path path = source;
  std::error_code error;
  if (fs::is_directory(path, error)) {
    const fs::path index = path / "model.safetensors.index.json";
    path = fs::exists(index, error) ? index : path / "model.safetensors";
    RAGGED_CHECK(
        fs::exists(path, error), "[model] Expected model.safetensors or its index in the folder '{}', but got neither.",
        source);
  }
  if (!fs::exists(path, error)) {
    const std::string near = nearest(source, names);
    RAGGED_CHECK(
        false, "[model] Expected a bundled model or a file, but got '{}'.{} Bundled: {}.", source,
        near.empty() ? "" : fmt::format(" Did you mean '{}'?", near), fmt::join(names, ", "));
  }
  Model model = load_file(path, options);
  if (model.inventory.name.empty() || path.extension() == ".safetensors" || path.string().ends_with(".index.json")) {
    model.inventory.name = source;
    // The model's config often lies beside its weights.
    const fs::path config = path.parent_path() / "config.json";
    if (fs::exists(config, error)) model.facts = facts_from_json(read_text(config, kMaxInventory, "model"));
  }
  return model;
}

}  // namespace ragged::sim
