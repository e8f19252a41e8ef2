#include "ragged/train/persistent_bytes.h"

#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ragged/base/error.h"
#include "ragged/optim/muon_plan.h"
#include "ragged/optim/tile_geometry.h"
#include "ragged/plan/bucket_plan.h"

namespace ragged::train {
namespace {

constexpr Index kFp32 = 4;

// Of the elements `owned` of one parameter.
Index state_bytes(const optim::OptimizerRow& row, layout::Interval owned) {
  if (row.optimizer == "soap") return 0;  // not by elements owned: see soap_bytes()
  const Index numel = owned.size();
  const Index moments = row.optimizer.starts_with("adamw") ? 2 : 1;
  const Index rows = row.optimizer == "normuon" ? optim::begun_rows(owned, row.shape.back()).size() : 0;
  if (row.state_format == "fp32") return kFp32 * (moments * numel + rows);
  if (row.state_format == "bf16") return moments * 2 * numel + kFp32 * rows;
  // In tiles: a byte an element, and a scale a tile.
  return moments * (numel + kFp32 * optim::owned_scales(row.shape, owned, row.name).size()) + kFp32 * rows;
}

// Of the matrices whose root this rank is.
Index soap_bytes(fsdp::Unit& root, const optim::OptimizerSpec& spec) {
  const comm::Communicator& shard = root.groups().shard;
  const auto units = root.units();
  const auto parameters = root.sharded_parameters();
  const std::vector<optim::ParamChoice> choices = optim::resolve(spec.kind, spec.rules, optim::param_facts(root));
  std::vector<optim::MatrixParam> matrices;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (choices[i].kind != "soap") continue;
    const buffer::ShardedTensor& parameter = parameters[i];
    const plan::BucketPlan& plan = *units[static_cast<std::size_t>(parameter.unit)]->plan();
    optim::MatrixParam param{
        .name = parameter.name,
        .shape = parameter.shape,
        .row_ranges = optim::ranges_of_rows(choices[i].splits),
        .bucket = parameter.unit};
    for (int rank = 0; rank < shard.size(); ++rank) param.held.push_back(plan.owned(parameter.index, rank));
    matrices.push_back(std::move(param));
  }
  const optim::SoapMath& math = spec.soap.math;
  const optim::SoapLayout layout = optim::soap_layout(matrices, math, spec.soap.movement.local_limit, shard.size());
  return kFp32 * optim::soap_state_numel(layout.matrices, math, shard.rank());
}

}  // namespace

PersistentBytes planned_persistent_bytes(
    fsdp::Unit& root, std::span<const optim::OptimizerRow> rows, const optim::OptimizerSpec& spec) {
  const int rank = root.groups().shard.rank();
  const auto units = root.units();
  PersistentBytes bytes;
  for (const auto& unit : units) {
    const plan::BucketPlan* plan = unit->plan();
    if (!plan) continue;
    bytes.parameters += kFp32 * plan->local_numel(rank);
    bytes.gradients += kFp32 * plan->local_numel(rank, plan->num_trainable_segments());
  }
  std::map<std::string, const optim::OptimizerRow*> by_name;
  for (const optim::OptimizerRow& row : rows) by_name[row.name] = &row;
  for (const buffer::ShardedTensor& parameter : root.sharded_parameters()) {
    const auto row = by_name.find(parameter.name);
    if (row == by_name.end()) continue;
    const plan::BucketPlan& plan = *units[static_cast<std::size_t>(parameter.unit)]->plan();
    bytes.optimizer_states += state_bytes(*row->second, plan.owned(parameter.index, rank));
  }
  bytes.optimizer_states += soap_bytes(root, spec);
  return bytes;
}

PersistentBytes measured_persistent_bytes(fsdp::Unit& root, const optim::Optimizer& optimizer) {
  PersistentBytes bytes;
  const auto nbytes = [](const at::Tensor& tensor) {
    return tensor.defined() ? static_cast<Index>(tensor.nbytes()) : Index{0};
  };
  for (const fsdp::FlatShard& shard : root.flat_shards()) {
    bytes.parameters += nbytes(shard.params);
    bytes.gradients += nbytes(shard.grads);
  }
  for (const buffer::ShardedTensor& state : optimizer.states()) bytes.optimizer_states += nbytes(state.local);
  return bytes;
}

}  // namespace ragged::train
