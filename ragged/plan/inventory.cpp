#include "ragged/plan/inventory.h"

#include <algorithm>
#include <limits>
#include <unordered_set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "ragged/plan/block.h"
#include "ragged/plan/json_reader.h"

namespace ragged::plan {
namespace {

using detail::JsonNode;

constexpr std::string_view kOperation = "inventory";
constexpr int kMaxDepth = 16;  // an inventory has eight levels
// A few bytes of text may stand for a great many tensors, by "count" and "repeat".
constexpr Index kMaxTensors = Index{1} << 22;
constexpr Index kMaxNumel = std::numeric_limits<Index>::max() / 4;

std::string replace(std::string text, char mark, const std::string& by) {
  for (std::size_t at = text.find(mark); at != std::string::npos; at = text.find(mark, at + by.size())) {
    text.replace(at, 1, by);
  }
  return text;
}

InventoryTensor read_tensor(const JsonNode& node, const std::string& dtype) {
  InventoryTensor tensor{
      .name = node.member("name").string(),
      .kind = node.string_or("kind", ""),
      .role = node.string_or("role", ""),
      .dtype = node.string_or("dtype", dtype)};
  const JsonNode shape = node.member("shape");
  for (std::size_t i = 0; i < shape.array_size(); ++i) tensor.shape.push_back(shape.element(i).integer());
  try {
    RAGGED_CHECK(tensor.numel() <= kMaxNumel, "too large");
  } catch (const InvalidArgument&) {
    RAGGED_CHECK(
        false, "[{}] Expected a tensor of fewer than 2^61 elements, but got more (param '{}', at {}).", kOperation,
        tensor.name, node.path());
  }
  return tensor;
}

class Reader {
 public:
  explicit Reader(const InventoryOptions& options) : options_(options) {}

  Inventory read(const JsonNode& node) {
    const Index format = node.member("format").integer();
    RAGGED_CHECK(format == 1, "[{}] Expected format 1, but got {}.", kOperation, format);
    inventory_.name = node.string_or("name", "");
    dtype_ = node.string_or("dtype", "");
    const JsonNode units = node.member("units");
    for (std::size_t i = 0; i < units.array_size(); ++i) read_units(units.element(i));
    if (node.has("total_params") && !options_.with_optional) {
      const Index stated = node.member("total_params").integer();
      RAGGED_CHECK(
          stated == numel_, "[{}] Expected shapes that sum to the stated {} parameters, but got {}.", kOperation,
          stated, numel_);
    }
    return std::move(inventory_);
  }

 private:
  void read_units(const JsonNode& node) {
    if (node.has("optional") && !options_.with_optional) return;
    const std::string pattern = node.member("name").string();
    const std::string prefix = node.string_or("prefix", "");
    const Index count = node.has("count") ? node.member("count").integer(1, kMaxTensors) : 1;
    const Index first = node.has("first") ? node.member("first").integer(0, kMaxTensors) : 0;
    const std::vector<InventoryTensor> tensors = read_tensors(node.member("params"));
    // Before anything is expanded. No overflow: both factors are at most 2^22.
    check_count(static_cast<Index>(names_.size()) + count * std::max<Index>(static_cast<Index>(tensors.size()), 1));
    const bool is_pattern = pattern.find('*') != std::string::npos;
    RAGGED_CHECK(
        is_pattern || count == 1,
        "[{}] Expected a '*' in the name of a unit that occurs {} times, but got '{}' (at {}).", kOperation, count,
        pattern, node.path());
    const std::string range = count > 1 ? fmt::format("{}-{}", first, first + count - 1) : fmt::format("{}", first);
    for (Index i = first; i < first + count; ++i) {
      const std::string index = fmt::format("{}", i);
      InventoryUnit unit{
          .name = replace(pattern, '*', index), .kind = replace(pattern, '*', range), .is_layer = is_pattern};
      const std::string unit_prefix = replace(prefix, '*', index);
      for (const InventoryTensor& tensor : tensors) {
        unit.tensors.push_back(tensor);
        unit.tensors.back().name = unit_prefix + tensor.name;
        count_in(unit.tensors.back());
      }
      RAGGED_CHECK(
          unit_names_.insert(unit.name).second, "[{}] Expected units of different names, but got '{}' twice.",
          kOperation, unit.name);
      inventory_.units.push_back(std::move(unit));
    }
  }

  std::vector<InventoryTensor> read_tensors(const JsonNode& params) const {
    std::vector<InventoryTensor> tensors;
    for (std::size_t i = 0; i < params.array_size(); ++i) {
      const JsonNode entry = params.element(i);
      if (!entry.has("repeat")) {
        tensors.push_back(read_tensor(entry, dtype_));
        continue;
      }
      const JsonNode inner = entry.member("params");
      std::vector<InventoryTensor> once;
      for (std::size_t j = 0; j < inner.array_size(); ++j) once.push_back(read_tensor(inner.element(j), dtype_));
      const Index repeat = entry.member("repeat").integer(0, kMaxTensors);
      check_count(static_cast<Index>(tensors.size()) + repeat * static_cast<Index>(once.size()));
      for (Index j = 0; j < repeat; ++j) {
        for (const InventoryTensor& tensor : once) {
          tensors.push_back(tensor);
          tensors.back().name = replace(tensor.name, '#', fmt::format("{}", j));
        }
      }
    }
    return tensors;
  }

  void count_in(const InventoryTensor& tensor) {
    RAGGED_CHECK(
        names_.insert(tensor.name).second, "[{}] Expected tensors of different names, but got '{}' twice.", kOperation,
        tensor.name);
    const Index numel = tensor.numel();
    RAGGED_CHECK(
        numel <= kMaxNumel - numel_, "[{}] Expected fewer than 2^61 elements in all, but got more (param '{}').",
        kOperation, tensor.name);
    numel_ += numel;
  }

  static void check_count(Index count) {
    RAGGED_CHECK(
        count <= kMaxTensors, "[{}] Expected at most {} tensors, but got more. Check \"count\" and \"repeat\".",
        kOperation, kMaxTensors);
  }

  const InventoryOptions& options_;
  Inventory inventory_;
  std::string dtype_;
  std::unordered_set<std::string> names_;
  std::unordered_set<std::string> unit_names_;
  Index numel_ = 0;
};

Block block_of(const InventoryTensor& tensor, const RowPolicy& policy) {
  const std::size_t dims = tensor.shape.size();
  if (dims < 2) return elements(1);
  if (dims == 2 && tensor.kind == "expert_fused") return rows(1);
  return rows(std::clamp<Index>(tensor.shape[dims - 2], 1, policy.rows));
}

}  // namespace

Index InventoryUnit::numel() const {
  Index sum = 0;
  for (const InventoryTensor& tensor : tensors) sum += tensor.numel();
  return sum;
}

Index Inventory::numel() const {
  Index sum = 0;
  for (const InventoryUnit& unit : units) sum += unit.numel();
  return sum;
}

Inventory inventory_from_json(std::string_view text, const InventoryOptions& options) {
  const nlohmann::ordered_json json = detail::parse_json(text, kMaxDepth, kOperation);
  return Reader(options).read(JsonNode(json, "inventory", kOperation));
}

Inventory merge_layers(const Inventory& inventory, int layers_per_bucket) {
  RAGGED_CHECK(
      layers_per_bucket >= 1, "[{}] Expected at least 1 layer a bucket, but got {}.", kOperation, layers_per_bucket);
  Inventory merged{.name = inventory.name};
  int num_merged = 0;
  for (const InventoryUnit& unit : inventory.units) {
    const bool joins =
        unit.is_layer && num_merged > 0 && num_merged < layers_per_bucket && merged.units.back().kind == unit.kind;
    num_merged = joins ? num_merged + 1 : 1;
    if (!joins) {
      merged.units.push_back(unit);
      continue;
    }
    InventoryUnit& last = merged.units.back();
    last.name += "+" + unit.name;
    last.tensors.insert(last.tensors.end(), unit.tensors.begin(), unit.tensors.end());
  }
  return merged;
}

std::vector<ParamSpec> param_specs(const InventoryUnit& unit, const RowPolicy& policy) {
  RAGGED_CHECK(policy.rows >= 1, "[{}] Expected at least 1 row a block, but got {}.", kOperation, policy.rows);
  std::vector<ParamSpec> specs;
  specs.reserve(unit.tensors.size());
  for (const InventoryTensor& tensor : unit.tensors) {
    ParamSpec spec{.name = tensor.name, .shape = tensor.shape};
    if (spec.numel() > 0) {
      const BlockExtent extent = block_extent(block_of(tensor, policy), tensor.shape, tensor.name);
      spec.block = extent.block;
      spec.restart = policy.flat ? 0 : extent.restart;
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

}  // namespace ragged::plan
