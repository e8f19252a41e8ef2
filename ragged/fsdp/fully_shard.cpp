// What fully_shard does once, before anything runs: collect, validate, plan, and take the parameters over. All checks
// look at facts that ranks share and come before any communication.
#include <algorithm>
#include <unordered_set>

#include <ATen/ATen.h>

#include "ragged/base/error.h"
#include "ragged/comm/scalar_type.h"
#include "ragged/fsdp/plan_group.h"
#include "ragged/fsdp/unit_impl.h"

namespace ragged::fsdp {
namespace {

struct OwnParam {
  std::string name;
  at::Tensor tensor;
};

std::string qualified(const std::string& module, const std::string& param) {
  return module.empty() ? param : module + "." + param;
}

std::string describe(const std::vector<torch::nn::Module*>& modules) {
  std::string text;
  for (const torch::nn::Module* module : modules) text += (text.empty() ? "" : ", ") + module->name();
  return text;
}

void check_options(const FullyShardOptions& options) {
  const layout::Mesh& mesh = options.groups.mesh;
  const int shard_dim = mesh.find(layout::DimRole::kShard);
  const int replicate_dim = mesh.find(layout::DimRole::kReplicate);
  const int shard = shard_dim < 0 ? 1 : mesh.size(shard_dim);
  const int replicate = replicate_dim < 0 ? 1 : mesh.size(replicate_dim);
  RAGGED_CHECK(
      options.groups.shard.size() == shard && options.groups.replicate.size() == replicate,
      "[fully_shard] Expected groups that fit the mesh {}, but got a shard group of {} and a replicate group of {}. "
      "Make "
      "them with World::groups(mesh).",
      layout::to_string(mesh), options.groups.shard.size(), options.groups.replicate.size());
}

void check_param(const std::string& name, const at::Tensor& param) {
  RAGGED_CHECK(
      param.dim() > 0,
      "[fully_shard] Expected parameters of at least one dim, but got a scalar (param '{}'). Make it 1-D, of one "
      "element.",
      name);
  RAGGED_CHECK(
      param.is_contiguous(),
      "[fully_shard] Expected contiguous parameters, but got strides {} for sizes {} (param '{}'). Call contiguous() "
      "on it "
      "first.",
      c10::str(param.strides()), c10::str(param.sizes()), name);
  RAGGED_CHECK(
      param.is_leaf(),
      "[fully_shard] Expected leaf tensors as parameters, but got a result of an operation (param '{}').", name);
  RAGGED_CHECK(
      !param.is_meta(),
      "[fully_shard] Expected a real parameter, but got one on the meta device (param '{}'). Build modules without "
      "memory "
      "from deferred_parameter().",
      name);
  comm::to_dtype(param.scalar_type());
}

}  // namespace

bool Unit::Impl::contains(const torch::nn::Module* module) const {
  for (torch::nn::Module* root : modules) {
    for (const auto& inside : root->modules(/*include_self=*/false)) {
      if (inside.get() == module) return true;
    }
    if (root == module) return true;
  }
  return false;
}

std::shared_ptr<Unit> fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  return fully_shard(std::vector<torch::nn::Module*>{&module}, options);
}

std::shared_ptr<Unit> fully_shard(std::vector<torch::nn::Module*> modules, const FullyShardOptions& options) {
  RAGGED_CHECK(!modules.empty(), "[fully_shard] Expected at least one module, but got none.");
  check_options(options);
  auto unit = std::shared_ptr<Unit>(new Unit());
  Unit::Impl& impl = *unit->impl_;
  impl.modules = modules;
  impl.options = options;

  // Collect what is ours; find the units of what isn't.
  std::vector<OwnParam> params;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& ignored : options.ignored_params) seen.insert(ignored.unsafeGetTensorImpl());
  const auto visit = [&](const std::string& module_name, torch::nn::Module& holder) {
    for (const auto& item : holder.named_parameters(/*recurse=*/false)) {
      const std::string name = qualified(module_name, item.key());
      const at::Tensor& param = item.value();
      if (!param.defined()) continue;
      const ParamGroup* group = ParamGroup::of(param);
      if (auto* owner = group ? static_cast<Unit*>(group->unit()) : nullptr) {
        RAGGED_CHECK(
            owner->impl_->contains(&holder),
            "[fully_shard] Expected each parameter in one unit, but '{}' is tied to a parameter of the unit made of {} "
            "(its '{}'). Shard the modules that share it in one call: fully_shard({{&a, &b}}, options).",
            name, describe(owner->impl_->modules), owner->impl_->group->plan().params.front().name);
        Unit* top = owner;
        while (top->impl_->parent && top->impl_->parent != unit.get()) top = top->impl_->parent;
        for (const torch::nn::Module* taken : top->impl_->modules) {
          RAGGED_CHECK(
              std::find(modules.begin(), modules.end(), taken) == modules.end(),
              "[fully_shard] Expected a module that isn't sharded yet, but {} was given to fully_shard before (param "
              "'{}').",
              taken->name(), name);
        }
        if (top->impl_->parent) continue;
        RAGGED_CHECK(
            !top->impl_->runtime,
            "[fully_shard] Expected the units inside {} not to have run as roots of their own, but the unit of {} has. "
            "Shard the whole model before using any part of it.",
            describe(modules), describe(top->impl_->modules));
        top->impl_->parent = unit.get();
        impl.children.push_back(top->shared_from_this());
        continue;
      }
      RAGGED_CHECK(
          !buffer::is_orphaned(param),
          "[fully_shard] Expected the units of inner modules to be alive, but the one that held '{}' was destroyed. "
          "Keep "
          "what fully_shard returns until the root is made.",
          name);
      if (!seen.insert(param.unsafeGetTensorImpl()).second) continue;  // ignored, or tied inside this unit
      check_param(name, param);
      params.push_back({name, param});
    }
  };
  try {
    for (torch::nn::Module* module : modules) {
      visit("", *module);
      for (const auto& item : module->named_modules("", /*include_self=*/false)) visit(item.key(), *item.value());
    }
    if (!params.empty())
      impl.group = unit->make_group(params.size(), [&](std::size_t i) {
        return std::pair{params[i].name, params[i].tensor};
      });
  } catch (...) {
    for (const auto& child : impl.children) child->impl_->parent = nullptr;  // nothing half taken over
    throw;
  }
  if (impl.group) impl.group->set_unit(unit.get());
  for (torch::nn::Module* module : modules) unit->announce(*module);
  return unit;
}

void Unit::announce(torch::nn::Module& module) {
  if (auto* shardable = dynamic_cast<Shardable*>(&module)) shardable->unit_ = weak_from_this();
}

std::shared_ptr<ParamGroup> Unit::make_group(
    std::size_t count, const std::function<std::pair<std::string, at::Tensor>(std::size_t)>& param_at) const {
  const FullyShardOptions& options = impl_->options;
  std::vector<ParamInfo> infos;
  std::vector<std::optional<plan::Block>> blocks;
  std::vector<at::Tensor> params;
  for (std::size_t i = 0; i < count; ++i) {
    auto [name, tensor] = param_at(i);
    infos.push_back(
        {.name = std::move(name),
         .shape = tensor.sizes().vec(),
         .dtype = tensor.scalar_type(),
         .requires_grad = tensor.requires_grad()});
    blocks.push_back(options.shard_policy ? options.shard_policy(infos.back()) : std::nullopt);
    params.push_back(std::move(tensor));
  }
  ParamGroupSpec spec = plan_group(infos, blocks, options.groups, options.mixed_precision, options.planning);
  if (options.sync_from_rank0) {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < count; ++i) {
      if (buffer::lacks_bytes(params[i])) continue;
      options.groups.shard.broadcast(params[i].detach(), 0, infos[i].name).wait();
      options.groups.replicate.broadcast(params[i].detach(), 0, infos[i].name).wait();
    }
  }
  auto group = std::make_shared<ParamGroup>(std::move(spec), params);
  group->gradients_in_place = options.gradients_in_place;
  group->gradient_memory = options.gradient_memory;
  for (std::size_t i = 0; i < count; ++i) params[i].set_data(group->image(static_cast<int>(i)));
  group->bind(std::move(params));
  return group;
}

}  // namespace ragged::fsdp
