#include "ragged/fsdp/unit.h"

#include <unordered_map>

#include <ATen/ATen.h>

#include "ragged/base/error.h"
#include "ragged/fsdp/unit_impl.h"

namespace ragged::fsdp {

Unit::Unit() : impl_(std::make_unique<Impl>()) {}

Unit::~Unit() {
  for (const auto& child : impl_->children) child->impl_->parent = nullptr;
  if (impl_->group) impl_->group->set_unit(nullptr);
}

bool Unit::is_root() const {
  return impl_->parent == nullptr;
}
bool Unit::checkpoints_activations() const {
  return impl_->options.activation_checkpointing;
}

const std::string& Unit::name() const {
  return impl_->name;
}

const comm::MeshGroups& Unit::groups() const {
  return impl_->options.groups;
}

const plan::BucketPlan* Unit::plan() const {
  return impl_->group ? &impl_->group->plan() : nullptr;
}

std::vector<at::Tensor> Unit::own_parameters() const {
  return impl_->group ? impl_->group->spec().params : std::vector<at::Tensor>{};
}

std::vector<std::shared_ptr<Unit>> Unit::units() const {
  std::vector<std::shared_ptr<Unit>> all{std::const_pointer_cast<Unit>(shared_from_this())};
  for (const auto& child : impl_->children) {
    const auto below = child->units();
    all.insert(all.end(), below.begin(), below.end());
  }
  return all;
}

// Made when first asked for; needs no communication. Names come from the root's module.
Runtime& Unit::runtime() const {
  if (impl_->runtime) return *impl_->runtime;
  if (impl_->parent) return impl_->parent->runtime();
  RAGGED_CHECK(
      impl_->modules.size() == 1,
      "[root] Expected the root to be one module, but got a unit of {}. Shard a module around them last.",
      impl_->modules.size());
  torch::nn::Module& module = *impl_->modules.front();
  std::unordered_map<const torch::nn::Module*, std::string> module_names;
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    module_names[item.value().get()] = item.key();
  std::unordered_map<const c10::TensorImpl*, std::string> param_names;
  for (const auto& item : module.named_parameters())
    param_names.emplace(item.value().unsafeGetTensorImpl(), item.key());

  const auto all = units();
  std::vector<RuntimeUnit> runtime_units;
  for (std::size_t i = 0; i < all.size(); ++i) {
    Impl& impl = *all[i]->impl_;
    RAGGED_CHECK(
        !impl.options.activation_checkpointing || impl.children.empty(),
        "[root] Expected activation checkpointing on units without units inside, but '{}' has {}. Checkpoint the inner "
        "ones.",
        module_names[impl.modules.front()], impl.children.size());
    impl.index = static_cast<int>(i);
    impl.name.clear();
    for (const torch::nn::Module* part : impl.modules) {
      impl.name += (part == impl.modules.front() ? "" : "+") + module_names[part];
    }
    RuntimeUnit unit;
    unit.name = impl.name;
    unit.parent = impl.parent ? impl.parent->impl_->index : -1;
    unit.mixed_precision = impl.options.mixed_precision;
    if (impl.group) {
      unit.groups = {impl.group};
      impl.group->reshard_after_forward = impl.options.reshard_after_forward.value_or(impl.parent != nullptr);
      std::vector<std::string> names;
      for (const at::Tensor& param : impl.group->spec().params)
        names.push_back(param_names[param.unsafeGetTensorImpl()]);
      impl.group->rename(impl.name.empty() ? "root" : impl.name, names);
    }
    runtime_units.push_back(std::move(unit));
  }
  auto made = std::make_shared<Runtime>(std::move(runtime_units), impl_->options.groups, impl_->runtime_options);
  for (const auto& unit : all) unit->impl_->runtime = made;
  return *made;
}

void Unit::for_each_group(bool recurse, const std::function<void(ParamGroup&, int)>& visit) const {
  runtime();
  if (impl_->group) visit(*impl_->group, impl_->index);
  if (!recurse) return;
  for (const auto& child : impl_->children) child->for_each_group(true, visit);
}

std::vector<buffer::ShardedTensor> Unit::sharded_parameters() {
  std::vector<buffer::ShardedTensor> tensors;
  for_each_group(true, [&](ParamGroup& group, int unit) {
    for (int i = 0; i < static_cast<int>(group.plan().params.size()); ++i) {
      tensors.push_back(group.sharded_parameter(i, unit));
    }
  });
  return tensors;
}

std::vector<buffer::ShardedTensor> Unit::sharded_gradients() {
  std::vector<buffer::ShardedTensor> tensors;
  for_each_group(true, [&](ParamGroup& group, int unit) {
    for (int i = 0; i < static_cast<int>(group.plan().params.size()); ++i) {
      if (group.has_grad(i)) tensors.push_back(group.sharded_gradient(i, unit));
    }
  });
  return tensors;
}

std::vector<FlatShard> Unit::flat_shards() {
  std::vector<FlatShard> shards;
  for_each_group(true, [&](ParamGroup& group, int unit) {
    FlatShard shard;
    shard.unit = unit;
    shard.params = group.masters().flat();
    shard.grads = group.grads().flat();
    const int rank = group.spec().groups.shard.rank();
    for (int i = 0; i < static_cast<int>(group.plan().params.size()); ++i) {
      const Index begin = group.plan().local_offset(i, rank);
      const Index length = group.plan().owned(i, rank).size();
      shard.pieces.push_back({.local = {begin, begin + length}, .index = i, .has_grad = group.has_grad(i)});
    }
    shards.push_back(std::move(shard));
  });
  return shards;
}

void Unit::mark_parameters_changed() {
  for_each_group(true, [](ParamGroup& group, int) { group.bump_master_version(); });
}

void Unit::zero_grad() {
  for_each_group(true, [](ParamGroup& group, int) { group.zero_grad(); });
}

void Unit::init_parameters(std::uint64_t seed, const InitFn& rule) {
  for_each_group(true, [&](ParamGroup& group, int) {
    const int rank = group.spec().groups.shard.rank();
    for (int i = 0; i < static_cast<int>(group.plan().params.size()); ++i) {
      const plan::ParamSpec& param = group.plan().params[static_cast<std::size_t>(i)];
      const layout::Interval owned = group.plan().owned(i, rank);
      const at::Tensor values = at::empty({owned.size()}, at::kFloat);
      fill_initial_values(rule(param.name, param.shape), seed, param.name, owned, values.mutable_data_ptr<float>());
      group.masters().tensor(i).copy_(values);
    }
    group.mark_initialised();
  });
}

at::Tensor Unit::full_parameter(const std::string& name) {
  at::Tensor full;
  runtime().check_ranks_agree();
  for_each_group(true, [&](ParamGroup& group, int) {
    for (std::size_t i = 0; i < group.plan().params.size(); ++i) {
      if (full.defined() || group.plan().params[i].name != name) continue;
      const bool was_sharded = group.state() == ShardState::kSharded;
      group.unshard();
      group.wait_for_unshard();
      const at::NoGradGuard no_grad;
      full = group.spec().params[i].detach().clone();
      if (was_sharded) group.reshard();
    }
  });
  RAGGED_CHECK(
      full.defined(), "[full_parameter] Expected the name of a parameter below this unit, but got '{}'.", name);
  return full;
}

void Unit::set_requires_gradient_sync(bool value, bool recurse) {
  for_each_group(recurse, [value](ParamGroup& group, int) { group.requires_gradient_sync = value; });
}

void Unit::set_requires_all_reduce(bool value, bool recurse) {
  for_each_group(recurse, [value](ParamGroup& group, int) { group.requires_all_reduce = value; });
}

void Unit::set_reshard_after_forward(bool value, bool recurse) {
  for_each_group(recurse, [value](ParamGroup& group, int) { group.reshard_after_forward = value; });
}

void Unit::set_runtime_options(const RuntimeOptions& options) {
  RAGGED_CHECK(
      is_root(), "[runtime] Expected the root, but got unit '{}'. Options hold for a whole tree.", impl_->name);
  RAGGED_CHECK(
      options.forward_prefetch >= 0 && options.backward_prefetch.value_or(0) >= 0,
      "[runtime] Expected prefetch depths of at least 0, but got {} (forward) and {} (backward).",
      options.forward_prefetch, options.backward_prefetch.value_or(0));
  RAGGED_CHECK(
      options.merge_bytes.value_or(0) >= 0,
      "[runtime] Expected collectives to merge by at least 0 bytes, but got {} (option 'merge_bytes').",
      options.merge_bytes.value_or(0));
  if (impl_->runtime) impl_->runtime->set_options(options);
  impl_->runtime_options = options;
}

void Unit::unshard() {
  runtime().check_ranks_agree();
  for_each_group(false, [](ParamGroup& group, int) {
    group.unshard();
    group.wait_for_unshard();
  });
}

void Unit::reshard() {
  for_each_group(false, [](ParamGroup& group, int) { group.reshard(); });
}

void Unit::reset() {
  runtime().reset();
}

RuntimeStats Unit::stats() const {
  Runtime& made = runtime();
  RuntimeStats stats;
  for (const RuntimeUnit& unit : made.units()) {
    for (const auto& group : unit.groups) stats.bytes += group->counters;
  }
  for (const comm::Communicator* communicator : {&made.groups().shard, &made.groups().replicate}) {
    stats.traffic += communicator->traffic();
    stats.wait_seconds += communicator->wait_seconds();
  }
  const buffer::PoolStats pool = made.pool().stats();
  stats.image_bytes_in_use = pool.in_use(buffer::SlotUse::kImage);
  stats.peak_image_bytes = pool.peak(buffer::SlotUse::kImage);
  stats.peak_reduce_bytes = pool.peak(buffer::SlotUse::kReduce);
  stats.pool_allocations = pool.allocations;
  stats.pool_reserved_bytes = pool.reserved_bytes;
  return stats;
}

void Unit::reset_peaks() {
  runtime().pool().reset_peaks();
}

StepForecast Unit::forecast(int micro_batches, bool sync_each_micro_batch) const {
  return runtime().forecast(micro_batches, sync_each_micro_batch);
}

ForwardScope::ForwardScope(Unit& unit, const TensorRefs& inputs) : unit_(unit) {
  Runtime& runtime = unit_.runtime();
  try {
    runtime.pre_forward(unit_.impl_->index, inputs);
  } catch (...) {
    runtime.abort_forward(unit_.impl_->index);
    throw;
  }
}

ForwardScope::~ForwardScope() {
  if (!finished_) unit_.runtime().abort_forward(unit_.impl_->index);
}

void ForwardScope::finish(const TensorRefs& outputs) {
  unit_.runtime().post_forward(unit_.impl_->index, outputs);
  finished_ = true;
}

}  // namespace ragged::fsdp
