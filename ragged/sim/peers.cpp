#include "ragged/sim/peers.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <utility>

namespace ragged::sim {
namespace {

struct Tensor {
  Index numel = 0;
  Index row = 1;  // elements behind the first dim
  std::size_t index = 0;
};

Tensor tensor_of(const plan::ParamSpec& param, std::size_t index) {
  Index row = 1;
  for (std::size_t d = 1; d < param.shape.size(); ++d) row *= param.shape[d];
  return {param.numel(), std::max<Index>(1, row), index};
}

// A least common multiple that no real layout reaches: beyond it everything is one shard.
constexpr Index kLargestGrid = std::numeric_limits<Index>::max() / (1 << 20);

Index grid_lcm(Index a, Index b) {
  return std::min(kLargestGrid, capped_lcm(a, b, kLargestGrid));
}

// v1: misfits were meant to go to a further group, but they widen the grid.
Index grid_v1(std::vector<Tensor> tensors) {
  std::ranges::stable_sort(tensors, std::greater{}, &Tensor::row);
  Index grid = tensors.front().row;
  for (const Tensor& tensor : tensors) {
    const bool divides = grid % tensor.row == 0 && tensor.numel % grid == 0;
    if (tensor.row == grid || divides || tensor.numel < grid) continue;
    grid = grid_lcm(grid, tensor.row);
  }
  return grid;
}

Index grid_v2(std::span<const Tensor> tensors, Index block_rows) {
  Index grid = 1;
  for (const Tensor& tensor : tensors) grid = grid_lcm(grid, block_rows * tensor.row);
  return grid;
}

struct Gap {
  Index begin = 0;
  Index end = 0;
};

// Puts tensors on the grid; two that overhang it may share a cell, and small ones fill what is left of it.
class GridLayout {
 public:
  GridLayout(std::span<const Tensor> tensors, Index grid, Index block_rows, bool is_v2, std::vector<Index>& starts)
      : grid_(grid), block_rows_(block_rows), is_v2_(is_v2), starts_(starts) {
    for (const Tensor& tensor : tensors) (tensor.numel < grid ? fragments_ : regulars_).push_back(tensor);
    if (is_v2) std::ranges::stable_sort(fragments_, std::greater{}, &Tensor::numel);
  }

  /// Returns where the last tensor ends.
  Index run() {
    while (!regulars_.empty()) {
      const Tensor tensor = regulars_.front();
      regulars_.erase(regulars_.begin());
      place_regular(tensor);
    }
    for (const Tensor& fragment : fragments_) {
      cursor_ = aligned(cursor_, fragment);
      starts_[fragment.index] = cursor_;
      cursor_ += fragment.numel;
    }
    return cursor_;
  }

 private:
  Index aligned(Index position, const Tensor& fragment) const {
    return is_v2_ ? round_up(position, block_rows_ * fragment.row) : position;
  }

  void place_regular(const Tensor& tensor) {
    starts_[tensor.index] = cursor_;
    const Index rest = tensor.numel % grid_;
    if (rest == 0) {
      cursor_ += tensor.numel;
      return;
    }
    Gap gap{cursor_ + tensor.numel, cursor_ + round_up(tensor.numel, grid_)};
    cursor_ = gap.end;
    const auto conjugate = std::ranges::find_if(regulars_, [&](const Tensor& other) {
      return other.numel % grid_ != 0 && rest + other.numel % grid_ <= grid_;
    });
    if (conjugate != regulars_.end()) {
      gap.end = cursor_ - conjugate->numel % grid_;
      starts_[conjugate->index] = gap.end;
      cursor_ += conjugate->numel / grid_ * grid_;
      regulars_.erase(conjugate);
    }
    fill(gap);
  }

  void fill(Gap gap) {
    std::erase_if(fragments_, [&](const Tensor& fragment) {
      const Index start = aligned(gap.begin, fragment);
      if (start + fragment.numel > gap.end) return false;
      starts_[fragment.index] = start;
      gap.begin = start + fragment.numel;
      return true;
    });
  }

  Index grid_;
  Index block_rows_;
  bool is_v2_;
  std::vector<Index>& starts_;
  std::vector<Tensor> fragments_;
  std::vector<Tensor> regulars_;
  Index cursor_ = 0;
};

Index cut_of(const plan::ParamSpec& param, Index start, Index shard) {
  return blocks_cut(start, param.numel(), param.block, param.restart, shard);
}

void lay_out_fsdp1(std::span<const plan::ParamSpec> params, const PeerOptions& options, PeerLayout& layout) {
  Index end = 0;
  for (std::size_t i = 0; i < params.size(); ++i) {
    layout.starts[i] = round_up(end, options.start_alignment);
    end = layout.starts[i] + params[i].numel();
  }
  layout.size = round_up(end, options.ranks);
  layout.groups = 1;
  for (std::size_t i = 0; i < params.size(); ++i) {
    layout.blocks_cut += cut_of(params[i], layout.starts[i], layout.size / options.ranks);
  }
}

void lay_out_fsdp2(std::span<const plan::ParamSpec> params, const PeerOptions& options, PeerLayout& layout) {
  Index numel = 0;
  for (const plan::ParamSpec& param : params) {
    const Index rows = param.shape.empty() ? 1 : param.shape[0];
    const Index row = rows == 0 ? 0 : param.numel() / rows;
    const Index shard = ceil_div(rows, options.ranks) * row;
    layout.size += shard * options.ranks;
    layout.blocks_cut += cut_of(param, 0, shard);
    numel += param.numel();
  }
  layout.groups = 1;
  layout.gather_copied = layout.size / options.ranks + numel;  // in and out
  layout.reduce_written = layout.size;
}

void lay_out_zero3(std::span<const plan::ParamSpec> params, const PeerOptions& options, PeerLayout& layout) {
  for (const plan::ParamSpec& param : params) {
    const Index numel = param.numel();
    const Index size = round_up(numel, options.ranks);
    layout.size += size;
    if (numel <= options.persistent) {  // neither gathered nor copied, but kept by all
      layout.replicated += numel * (options.ranks - 1);
    } else {
      layout.gather_copied += size / options.ranks + numel;
    }
    layout.reduce_written += size;
    layout.blocks_cut += cut_of(param, 0, size / options.ranks);
  }
  layout.groups = 1;  // parameters of a unit are coalesced
}

void lay_out_megatron(
    Peer peer, std::span<const plan::ParamSpec> params, const PeerOptions& options, PeerLayout& layout) {
  const bool is_v2 = peer == Peer::kMegatronV2 || peer == Peer::kMegatronV2PerRow;
  const bool per_row = peer == Peer::kMegatronV1PerRow || peer == Peer::kMegatronV2PerRow;
  const Index block_rows = is_v2 ? options.block_rows : 1;
  const Index ranks = is_v2 && options.mesh_ranks > 0 ? options.mesh_ranks : options.ranks;
  std::map<std::pair<bool, Index>, std::vector<Tensor>> groups;  // (expert, row) -> tensors in order
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Tensor tensor = tensor_of(params[i], i);
    if (tensor.numel == 0) continue;
    const bool is_expert = ("." + params[i].name).find(".experts.") != std::string::npos;
    groups[{is_expert, per_row ? tensor.row : 0}].push_back(tensor);
    layout.reduce_written += tensor.numel;
  }
  for (const auto& [group, tensors] : groups) {
    const Index grid = is_v2 ? grid_v2(tensors, block_rows) : grid_v1(tensors);
    const Index end = GridLayout(tensors, grid, block_rows, is_v2, layout.starts).run();
    const Index size = round_up(end, ranks * grid);
    layout.size += size;
    ++layout.groups;
    for (const Tensor& tensor : tensors) {
      layout.blocks_cut += cut_of(params[tensor.index], layout.starts[tensor.index], size / options.ranks);
    }
  }
}

}  // namespace

std::string_view title(Peer peer) {
  switch (peer) {
    case Peer::kFsdp1:
      return "FSDP1";
    case Peer::kFsdp2:
      return "FSDP2";
    case Peer::kZero3:
      return "DeepSpeed ZeRO-3";
    case Peer::kMegatronV1:
      return "Megatron-FSDP v1";
    case Peer::kMegatronV2:
      return "Megatron-FSDP v2";
    case Peer::kMegatronV1PerRow:
      return "  v1, a group per row size";
    case Peer::kMegatronV2PerRow:
      return "  v2, a group per row size";
  }
  return "?";
}

std::string_view key(Peer peer) {
  switch (peer) {
    case Peer::kFsdp1:
      return "fsdp1";
    case Peer::kFsdp2:
      return "fsdp2";
    case Peer::kZero3:
      return "zero3";
    case Peer::kMegatronV1:
      return "megatron_v1";
    case Peer::kMegatronV2:
      return "megatron_v2";
    case Peer::kMegatronV1PerRow:
      return "megatron_v1_per_row";
    case Peer::kMegatronV2PerRow:
      return "megatron_v2_per_row";
  }
  return "?";
}

Index blocks_cut(Index start, Index numel, Index block, Index restart, Index shard) {
  if (shard <= 0 || numel <= 0) return 0;
  const Index run = restart > 0 ? restart : numel;
  const Index blocks_in_run = ceil_div(run, block);
  Index cut = 0;
  Index last = -1;  // borders ascend, so equal blocks follow one another
  for (Index border = round_up(start + 1, shard); border < start + numel; border += shard) {
    const Index position = border - start;
    const Index within = position % run;
    if (within % block == 0) continue;
    const Index index = position / run * blocks_in_run + within / block;
    cut += index != last ? 1 : 0;
    last = index;
  }
  return cut;
}

PeerLayout peer_layout(Peer peer, std::span<const plan::ParamSpec> params, const PeerOptions& options) {
  RAGGED_CHECK(options.ranks >= 1, "[plan] Expected at least 1 rank, but got {}.", options.ranks);
  PeerLayout layout;
  layout.starts.assign(params.size(), 0);
  switch (peer) {
    case Peer::kFsdp1:
      lay_out_fsdp1(params, options, layout);
      break;
    case Peer::kFsdp2:
      lay_out_fsdp2(params, options, layout);
      break;
    case Peer::kZero3:
      lay_out_zero3(params, options, layout);
      break;
    default:
      lay_out_megatron(peer, params, options, layout);
  }
  layout.padding = layout.size;
  for (const plan::ParamSpec& param : params) layout.padding -= param.numel();
  return layout;
}

}  // namespace ragged::sim
