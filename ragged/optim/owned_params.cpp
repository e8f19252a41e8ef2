#include "ragged/optim/owned_params.h"

#include <algorithm>
#include <map>
#include <optional>

#include <ATen/ATen.h>

#include "ragged/base/error.h"
#include "ragged/optim/tile_geometry.h"

namespace ragged::optim {

OwnedParams::OwnedParams(
    std::shared_ptr<fsdp::Unit> root, const ParamPolicy& policy, double weight_decay, std::string optimizer)
    : root_(std::move(root)), optimizer_(std::move(optimizer)) {
  const auto parameters = root_->sharded_parameters();
  tree_size_ = parameters.size();
  const std::vector<fsdp::FlatShard> shards = root_->flat_shards();
  std::size_t position = 0;
  for (std::size_t s = 0; s < shards.size(); ++s) {
    for (std::size_t i = 0; i < shards[s].pieces.size(); ++i, ++position) {
      const buffer::ShardedTensor& tensor = parameters[position];
      const ParamSettings settings = policy ? policy(tensor) : ParamSettings{};
      if (!settings.takes) continue;
      const double decay = settings.weight_decay.value_or(tensor.shape.size() >= 2 ? weight_decay : 0.0);
      RAGGED_CHECK(
          tensor.dtype == at::kFloat, "[{}] Expected fp32 masters, but got {} (param '{}').", optimizer_,
          c10::toString(tensor.dtype), tensor.name);
      RAGGED_CHECK(
          settings.lr_scale >= 0.0 && decay >= 0.0,
          "[{}] Expected lr_scale >= 0 and weight_decay >= 0, but the policy gave {} and {} (param '{}').", optimizer_,
          settings.lr_scale, decay, tensor.name);
      list_.push_back(
          {.tensor = tensor,
           .position = position,
           .shard = s,
           .piece = i,
           .local = shards[s].pieces[i].local,
           .lr_scale = settings.lr_scale,
           .weight_decay = decay,
           .state_format = settings.state_format.value_or("")});
    }
  }
  RAGGED_CHECK(
      !list_.empty() || parameters.empty(),
      "[{}] Expected a policy that takes at least one parameter, but it takes none of {}.", optimizer_,
      parameters.size());
  for (std::size_t i = 0; i < list_.size(); ++i) memory_order_.push_back(i);
  std::stable_sort(memory_order_.begin(), memory_order_.end(), [this](std::size_t a, std::size_t b) {
    const auto key = [](const OwnedParam& p) { return std::pair(p.shard, p.local.begin); };
    return key(list_[a]) < key(list_[b]);
  });
}

void OwnedParams::for_each_gradient(
    const std::function<void(std::size_t, const at::Tensor&, const at::Tensor&)>& visit) {
  const std::vector<fsdp::FlatShard> shards = root_->flat_shards();
  for (const std::size_t i : memory_order_) {
    OwnedParam& param = list_[i];
    const fsdp::FlatShard& shard = shards[param.shard];
    const fsdp::FlatShard::Piece& piece = shard.pieces[param.piece];
    if (!piece.has_grad) continue;
    ++param.steps;
    if (piece.local.empty()) continue;
    const auto part = [&piece](const at::Tensor& flat) {
      return flat.narrow(0, piece.local.begin, piece.local.size());
    };
    visit(i, part(shard.params), part(shard.grads));
  }
  root_->mark_parameters_changed();
}

std::vector<std::int64_t> OwnedParams::steps() const {
  std::vector<std::int64_t> all(tree_size_, 0);
  for (const OwnedParam& param : list_) all[param.position] = param.steps;
  return all;
}

void OwnedParams::set_steps(const std::vector<std::int64_t>& steps) {
  RAGGED_CHECK(
      steps.size() == tree_size_, "[{}] Expected a count of steps for each of {} parameters, but got {}.", optimizer_,
      tree_size_, steps.size());
  for (const OwnedParam& param : list_) {
    RAGGED_CHECK(
        steps[param.position] >= 0, "[{}] Expected counts of steps >= 0, but got {} (param '{}').", optimizer_,
        steps[param.position], param.tensor.name);
  }
  for (OwnedParam& param : list_) param.steps = steps[param.position];
}

AdamWStep OwnedParams::constants(const OwnedParam& param, AdamWRates rates) const {
  rates.lr *= param.lr_scale;
  rates.weight_decay = param.weight_decay;
  return adamw_constants(rates, param.steps);
}

const char* moment_format(at::ScalarType dtype) {
  return dtype == at::kFloat ? "fp32" : "bf16";
}

const char* tile_format_name(TileFormat format) {
  return format == TileFormat::kPower ? "power 32x32" : "dynamic 32x32";
}

std::vector<Moments> make_moments(
    const OwnedParams& params, const std::function<std::optional<at::ScalarType>(const OwnedParam&)>& dtype_of) {
  const std::vector<OwnedParam>& list = params.list();
  // One run a shard and dtype.
  using Key = std::pair<std::size_t, at::ScalarType>;
  std::map<Key, Index> numels;
  std::vector<Index> offsets(list.size(), 0);
  for (const std::size_t i : params.in_memory_order()) {
    const auto dtype = dtype_of(list[i]);
    if (!dtype) continue;
    Index& numel = numels[{list[i].shard, *dtype}];
    offsets[i] = numel;
    numel += list[i].local.size();
  }
  std::map<Key, Moments> runs;
  std::vector<Moments> moments(list.size());
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto dtype = dtype_of(list[i]);
    if (!dtype) continue;
    const Key key{list[i].shard, *dtype};
    auto run = runs.find(key);
    if (run == runs.end()) {
      const auto like = list[i].tensor.local.options().dtype(*dtype);
      run = runs.emplace(key, Moments{at::zeros({numels[key]}, like), at::zeros({numels[key]}, like)}).first;
    }
    const Index size = list[i].local.size();
    moments[i] = {run->second.exp_avg.narrow(0, offsets[i], size), run->second.exp_avg_sq.narrow(0, offsets[i], size)};
  }
  return moments;
}

std::vector<layout::Interval> held_by_rank(const buffer::ShardedTensor& tensor, int ranks) {
  const int dim = tensor.mesh.find(layout::DimRole::kShard);
  if (ranks == 1 || dim < 0) return {{0, checked_product(tensor.shape)}};
  const auto& ragged = std::get<layout::RaggedShard>(tensor.placements.at(static_cast<std::size_t>(dim)));
  std::vector<layout::Interval> held;
  for (int rank = 0; rank < ranks; ++rank) held.push_back(layout::ragged_interval(tensor.shape, ragged, rank));
  return held;
}

StateLayout layout_beside(
    const buffer::ShardedTensor& param, std::vector<Index> shape,
    const std::function<layout::Interval(layout::Interval)>& of) {
  StateLayout state{.shape = std::move(shape), .placements = {}, .owned = of(param.owned)};
  for (const layout::Placement& placement : param.placements) {
    const auto* ragged = std::get_if<layout::RaggedShard>(&placement);
    if (!ragged) {
      state.placements.push_back(placement);
      continue;
    }
    std::vector<layout::Interval> by_rank;
    for (int rank = 0; rank < ragged->world_size(); ++rank)
      by_rank.push_back(of(layout::ragged_interval(param.shape, *ragged, rank)));
    state.placements.emplace_back(layout::ragged_from_intervals(state.shape, by_rank));
  }
  return state;
}

StateLayout layout_of_scales(const buffer::ShardedTensor& param) {
  const auto of = [&](layout::Interval owned) { return owned_scales(param.shape, owned, param.name); };
  of({});  // refuses vectors, which have no shape of scales
  return layout_beside(param, scales_shape(param.shape), of);
}

buffer::ShardedTensor state_like(const OwnedParam& param, const char* suffix, const at::Tensor& local) {
  buffer::ShardedTensor state = param.tensor;
  state.name += suffix;
  state.dtype = local.scalar_type();
  state.local = local;
  state.requires_grad = false;
  return state;
}

buffer::ShardedTensor state_beside(
    const OwnedParam& param, const char* suffix, const at::Tensor& local, const StateLayout& layout) {
  buffer::ShardedTensor state = state_like(param, suffix, local);
  state.shape = layout.shape;
  state.placements = layout.placements;
  state.owned = layout.owned;
  return state;
}

}  // namespace ragged::optim
