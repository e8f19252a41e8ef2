#include "ragged/checkpoint/state.h"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/ranges.h>

namespace ragged::checkpoint {
namespace {

constexpr std::pair<at::ScalarType, const char*> kDtypes[] = {
    {at::kDouble, "F64"},
    {at::kFloat, "F32"},
    {at::kHalf, "F16"},
    {at::kBFloat16, "BF16"},
    {at::kLong, "I64"},
    {at::kInt, "I32"},
    {at::kShort, "I16"},
    {at::kChar, "I8"},
    {at::kByte, "U8"},
    {at::kBool, "BOOL"},
    {at::kFloat8_e4m3fn, "F8_E4M3"},
    {at::kFloat8_e5m2, "F8_E5M2"}};

bool is_flat(const layout::Placement& placement) {
  if (const auto* shard = std::get_if<layout::Shard>(&placement)) return shard->dim == 0;
  return std::holds_alternative<layout::RaggedShard>(placement) || std::holds_alternative<layout::Replicate>(placement);
}

// The rank's position in every mesh dim along which the tensor is only repeated is 0, or with `all_dims` in every one.
bool is_first(const buffer::ShardedTensor& tensor, int rank, bool all_dims) {
  const std::vector<int> coordinates = tensor.mesh.coordinates(rank);
  for (std::size_t d = 0; d < coordinates.size(); ++d) {
    const bool counts = all_dims || std::holds_alternative<layout::Replicate>(tensor.placements.at(d));
    if (counts && coordinates[d] != 0) return false;
  }
  return true;
}

std::string describe(const buffer::ShardedTensor& tensor) {
  std::string text;
  for (const layout::Placement& placement : tensor.placements) {
    text += (text.empty() ? "" : ", ") + layout::to_string(placement);
  }
  return text;
}

}  // namespace

std::vector<Item> model_items(const std::vector<buffer::ShardedTensor>& parameters, const NameMap& names) {
  std::vector<Item> items;
  for (const buffer::ShardedTensor& tensor : parameters) {
    items.push_back({.tensor = tensor, .name = names ? names(tensor.name) : tensor.name});
  }
  return items;
}

std::vector<Item> optimizer_items(
    const std::vector<buffer::ShardedTensor>& states, const std::map<std::string, std::string>& formats) {
  std::vector<Item> items;
  for (const buffer::ShardedTensor& tensor : states) {
    // States of one parameter may have names of several parts: "<parameter>.exp_avg.codes".
    std::string format;
    for (std::size_t dot = tensor.name.rfind('.'); dot != std::string::npos && dot > 0;
         dot = tensor.name.rfind('.', dot - 1)) {
      const auto found = formats.find(tensor.name.substr(0, dot));
      if (found == formats.end()) continue;
      format = found->second;
      break;
    }
    if (format == "fp32" || format == "bf16") format.clear();
    items.push_back({.tensor = tensor, .name = "state." + tensor.name, .format = std::move(format)});
  }
  return items;
}

std::string stored_dtype(at::ScalarType type) {
  const auto* found = std::ranges::find(kDtypes, type, &std::pair<at::ScalarType, const char*>::first);
  RAGGED_CHECK(
      found != std::end(kDtypes), "[checkpoint] Expected a dtype that safetensors has, but got {}.",
      c10::toString(type));
  return found->second;
}

void check_items(const std::vector<Item>& items) {
  for (const Item& item : items) {
    const buffer::ShardedTensor& tensor = item.tensor;
    static_cast<void>(stored_dtype(tensor.dtype));
    RAGGED_CHECK(
        std::ranges::all_of(tensor.placements, is_flat) && tensor.placements.size() == tensor.mesh.dims().size(),
        "[checkpoint] Expected one of RaggedShard, Shard(0) and Replicate for each mesh dim, but got {} (param '{}'). "
        "Redistribute the tensor first.",
        describe(tensor), item.name);
    RAGGED_CHECK(
        tensor.local.scalar_type() == tensor.dtype,
        "[checkpoint] Expected a local tensor of {}, but got {} (param '{}').", c10::toString(tensor.dtype),
        c10::toString(tensor.local.scalar_type()), item.name);
  }
}

std::vector<Part> parts_of(const std::vector<Item>& items, int rank) {
  check_items(items);
  std::vector<Part> parts;
  for (const Item& item : items) {
    parts.push_back(
        {.info =
             {.name = item.name,
              .dtype = stored_dtype(item.tensor.dtype),
              .shape = item.tensor.shape,
              .format = item.format,
              .placement = describe(item.tensor)},
         .local = item.tensor.local,
         .owned = item.tensor.owned,
         .writes = is_first(item.tensor, rank, false),
         .announces_empty = is_first(item.tensor, rank, true)});
  }
  return parts;
}

void check_parts(const std::vector<Part>& parts) {
  std::set<std::string> names;
  for (const Part& part : parts) {
    const TensorInfo& info = part.info;
    RAGGED_CHECK(
        names.insert(info.name).second, "[checkpoint] Expected tensors of different names, but got '{}' twice.",
        info.name);
    bool is_inside = true;
    if (part.within) {
      const auto& [offset, size] = *part.within;
      is_inside = offset.size() == info.shape.size() && size.size() == info.shape.size();
      for (std::size_t d = 0; is_inside && d < info.shape.size(); ++d) {
        is_inside = offset[d] >= 0 && size[d] >= 0 && offset[d] + size[d] <= info.shape[d];
      }
    }
    const Index numel = is_inside ? checked_product(part.within ? part.within->size : info.shape) : 0;
    const layout::Interval owned = part.owned;
    RAGGED_CHECK(
        is_inside && part.local.dim() == 1 && part.local.is_contiguous() &&
            stored_dtype(part.local.scalar_type()) == info.dtype && part.local.numel() == owned.size() &&
            owned.begin >= 0 && owned.end <= std::max<Index>(owned.begin, numel),
        "[checkpoint] Expected the {} elements [{}, {}) of a tensor of shape [{}] in a contiguous 1-D tensor of {}, "
        "but got {} of {} (param '{}').",
        owned.size(), owned.begin, owned.end, fmt::join(info.shape, ", "), info.dtype, part.local.numel(),
        c10::toString(part.local.scalar_type()), info.name);
  }
}

std::vector<TensorInfo> infos_of(const std::vector<Part>& parts) {
  std::vector<TensorInfo> infos;
  for (const Part& part : parts) infos.push_back(part.info);
  return infos;
}

std::vector<WritePiece> write_pieces(const std::vector<Part>& parts) {
  std::vector<WritePiece> pieces;
  for (const Part& part : parts) {
    pieces.push_back(
        {.name = part.info.name,
         .dtype = part.info.dtype,
         .shape = part.info.shape,
         .owned = part.writes ? part.owned : layout::Interval{},
         .announces_empty = part.announces_empty,
         .within = part.within});
  }
  return pieces;
}

std::vector<ReadPiece> read_pieces(const std::vector<Part>& parts) {
  std::vector<ReadPiece> pieces;
  for (const Part& part : parts) {
    pieces.push_back(
        {.name = part.info.name,
         .dtype = part.info.dtype,
         .shape = part.info.shape,
         .format = part.info.format,
         .owned = part.owned,
         .within = part.within});
  }
  return pieces;
}

}  // namespace ragged::checkpoint
