// The runtime for Python: process groups, parameter groups, and the four events. Each event is one call; the GIL is
// released in it and taken again for the moments in which Python objects change hands (group_front.h).
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "python/bindings/bindings.h"
#include "python/bindings/group_front.h"
#include "python/bindings/python_calls.h"
#include "ragged/base/error.h"
#include "ragged/fsdp/gradients_in_place.h"
#include "ragged/fsdp/plan_group.h"
#include "ragged/fsdp/runtime.h"
#include "ragged/plan/plan_json.h"

namespace ragged::python {
namespace {

using fsdp::ParamGroup;
using fsdp::Runtime;
using Group = std::shared_ptr<ParamGroup>;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

comm::Communicator make_communicator(
    const std::optional<std::string>& group_name, c10::Device device, const std::string& name, bool stock,
    bool check_order) {
  if (!group_name) return {};
  comm::CommOptions options;
  options.collectives = stock ? comm::Collectives::kStock : comm::Collectives::kAuto;
  options.check_order = check_order;
  auto group = c10d::resolve_process_group(*group_name);
  if (group->getSize() == 1) return {};
  return comm::Communicator(std::move(group), device, options, name);
}

comm::MeshGroups make_groups(
    const comm::Communicator& shard, const comm::Communicator& replicate, const std::vector<int>& ranks, int rank,
    c10::Device device) {
  comm::MeshGroups groups;
  groups.mesh = layout::Mesh(
      {{"replicate", replicate.size(), layout::DimRole::kReplicate}, {"shard", shard.size(), layout::DimRole::kShard}},
      ranks);
  groups.rank = rank;
  groups.shard = shard;
  groups.replicate = replicate;
  groups.device = device;
  return groups;
}

plan::Block parse_block(const std::tuple<std::string, Index, Index>& block) {
  const auto& [kind, count, columns] = block;
  if (kind == "elements") return plan::elements(count);
  if (kind == "rows") return plan::rows(count);
  if (kind == "tile") return plan::tile(count, columns);
  RAGGED_CHECK(
      kind == "whole",
      "[shard_policy] Expected elements, rows, tile or whole, but got '{}'. Use the functions of those names.", kind);
  return plan::whole();
}

struct ParamArgs {
  std::vector<std::string> names;
  std::vector<std::vector<Index>> shapes;
  std::vector<bool> requires_grad;
  std::vector<std::optional<std::tuple<std::string, Index, Index>>> blocks;
};

Group make_group(
    const ParamArgs& params, at::ScalarType dtype, std::optional<at::ScalarType> param_dtype,
    std::optional<at::ScalarType> reduce_dtype, const comm::MeshGroups& groups,
    const std::vector<std::optional<at::Tensor>>& values, bool front_holds_values,
    const fsdp::ParamGroupSpec::Offload& offload, const plan::PlanOptions& planning) {
  std::vector<fsdp::ParamInfo> infos;
  std::vector<std::optional<plan::Block>> blocks;
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < params.names.size(); ++i) {
    infos.push_back(
        {.name = params.names[i], .shape = params.shapes[i], .dtype = dtype, .requires_grad = params.requires_grad[i]});
    blocks.push_back(params.blocks[i] ? std::optional(parse_block(*params.blocks[i])) : std::nullopt);
    tensors.push_back(values[i].value_or(at::Tensor()));
  }
  py::gil_scoped_release no_gil;
  const fsdp::MixedPrecision dtypes{.param_dtype = param_dtype, .reduce_dtype = reduce_dtype};
  fsdp::ParamGroupSpec spec = front_holds_values ? fsdp::plan_front_group(infos, groups, dtypes)
                                                 : fsdp::plan_group(infos, blocks, groups, dtypes, planning);
  spec.offload = offload;
  return std::make_shared<ParamGroup>(std::move(spec), tensors);
}

// The front is owned by the group; Python reaches it through the group's binding.
void set_front(ParamGroup& group, std::vector<PythonParam> params, const PythonCalls& calls, py::object gatherer) {
  std::vector<at::Tensor> leaves;
  for (const PythonParam& param : params) leaves.push_back(THPVariable_Unpack(param.unsharded.ptr()));
  group.bind(std::move(leaves));
  group.set_front(std::make_unique<PythonFront>(std::move(params), calls, std::move(gatherer)));
}

fsdp::TensorRefs refs_of(std::vector<at::Tensor>& tensors) {
  fsdp::TensorRefs refs;
  for (at::Tensor& tensor : tensors) refs.push_back(&tensor);
  return refs;
}

// Runs an event over tensors; the new ones, or none when all are the same objects as before.
template <class Event>
std::optional<std::vector<at::Tensor>> over(std::vector<at::Tensor> tensors, Event&& event) {
  std::vector<at::Tensor> before = tensors;
  {
    py::gil_scoped_release no_gil;
    event(refs_of(tensors));
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].is_same(before[i])) return tensors;
  }
  return std::nullopt;
}

py::dict stats_of(const Runtime& runtime) {
  buffer::ByteCounters bytes;
  comm::Traffic traffic;
  double wait_seconds = 0.0;
  std::vector<const c10d::ProcessGroup*> counted;
  for (const fsdp::RuntimeUnit& unit : runtime.units()) {
    for (const Group& group : unit.groups) {
      bytes += group->counters;
      const comm::MeshGroups& groups = group->spec().groups;
      for (const comm::Communicator* communicator : {&groups.shard, &groups.replicate}) {
        const auto* process_group = communicator->process_group().get();
        if (!process_group || std::find(counted.begin(), counted.end(), process_group) != counted.end()) continue;
        counted.push_back(process_group);
        traffic += communicator->traffic();
        wait_seconds += communicator->wait_seconds();
      }
    }
  }
  const buffer::PoolStats pool = runtime.pool().stats();
  py::dict stats;
  stats["cast_in"] = bytes.cast_in;
  stats["cast_grad"] = bytes.cast_grad;
  stats["in_place"] = bytes.in_place;
  stats["added"] = bytes.added;
  stats["zeroed"] = bytes.zeroed;
  stats["copied"] = bytes.copied;
  stats["gathered_bytes"] = traffic.gathered_bytes;
  stats["reduced_bytes"] = traffic.reduced_bytes;
  stats["all_gathers"] = traffic.all_gathers;
  stats["reduce_scatters"] = traffic.reduce_scatters;
  stats["all_reduces"] = traffic.all_reduces;
  stats["image_bytes_in_use"] = pool.in_use(buffer::SlotUse::kImage);
  stats["peak_image_bytes"] = pool.peak(buffer::SlotUse::kImage);
  stats["peak_reduce_bytes"] = pool.peak(buffer::SlotUse::kReduce);
  stats["gradient_bytes_in_use"] = pool.in_use(buffer::SlotUse::kGradient);
  stats["pool_allocations"] = pool.allocations;
  stats["pool_reserved_bytes"] = pool.reserved_bytes;
  stats["wait_seconds"] = wait_seconds;
  return stats;
}

py::dict forecast_of(const Runtime& runtime, int micro_batches, bool sync_each) {
  const fsdp::StepForecast forecast = runtime.forecast(micro_batches, sync_each);
  py::dict result;
  result["padding_bytes"] = forecast.padding_bytes;
  result["gathered_bytes"] = forecast.gathered_bytes;
  result["reduced_bytes"] = forecast.reduced_bytes;
  result["cast_in"] = forecast.cast_in_bytes;
  result["cast_grad"] = forecast.cast_grad_bytes;
  result["added"] = forecast.added_grad_bytes;
  result["copied"] = forecast.copied_bytes;
  result["peak_image_bytes"] = forecast.peak_image_bytes;
  result["image_bytes_bound"] = forecast.image_bytes_bound;
  result["peak_reduce_bytes"] = forecast.peak_reduce_bytes;
  result["all_gathers"] = forecast.gathers;
  result["reduce_scatters"] = forecast.reduces;
  return result;
}

constexpr std::pair<const char*, fsdp::GradientsInPlace> kInPlaceNames[] = {
    {"no", fsdp::GradientsInPlace::kNo},
    {"same_bits", fsdp::GradientsInPlace::kSameBits},
    {"always", fsdp::GradientsInPlace::kAlways},
};

std::string in_place_name(fsdp::GradientsInPlace value) {
  for (const auto& [name, known] : kInPlaceNames) {
    if (known == value) return name;
  }
  throw InternalError("[gradients_in_place] A value without a name.");
}

fsdp::GradientsInPlace parse_in_place(const std::string& text) {
  for (const auto& [name, value] : kInPlaceNames) {
    if (name == text) return value;
  }
  throw InvalidArgument(
      fmt::format("[fully_shard] Expected gradients_in_place to be no, same_bits or always, but got '{}'.", text));
}

plan::PlanStrategy parse_strategy(const std::string& text) {
  if (text == "auto") return plan::PlanStrategy::kAuto;
  if (text == "single") return plan::PlanStrategy::kSingle;
  RAGGED_CHECK(
      text == "paper", "[planning] Expected the strategy auto, single or paper, but got '{}'. Leave it out for auto.",
      text);
  return plan::PlanStrategy::kPaper;
}

// A plan without tensors, process groups or devices: (JSON, text, report).
std::tuple<std::string, std::string, py::dict> plan_bucket(
    const ParamArgs& params, int world_size, Index element_bytes, plan::PlanOptions options) {
  options.world_size = world_size;
  options.collective_unit = options.start_alignment = fsdp::collective_unit(element_bytes);
  std::vector<plan::ParamSpec> specs;
  for (std::size_t i = 0; i < params.names.size(); ++i) {
    specs.push_back(fsdp::param_spec(
        {.name = params.names[i], .shape = params.shapes[i], .requires_grad = params.requires_grad[i]},
        params.blocks[i] ? std::optional(parse_block(*params.blocks[i])) : std::nullopt, options.collective_unit));
  }
  plan::PlanReport report;
  const plan::BucketPlan plan = plan::plan_bucket(specs, options, &report);
  py::dict numbers;
  numbers["numel"] = report.numel;
  numbers["image"] = report.image;
  numbers["padding"] = report.padding();
  numbers["uniform_only"] = report.uniform_only;
  numbers["bound"] = report.bound;
  numbers["uniform_segments"] = report.num_uniform_segments;
  numbers["ragged_segments"] = report.num_ragged_segments;
  numbers["ragged_blocks"] = report.ragged_blocks;
  Index largest = 0;
  for (int rank = 0; rank < world_size; ++rank) largest = std::max(largest, plan.local_numel(rank));
  numbers["largest_shard"] = largest;
  return {plan::to_json(plan), plan::to_string(plan), numbers};
}

void bind_planning(py::module_& module) {
  py::class_<plan::PlanOptions>(module, "PlanOptions")
      .def(
          py::init([](const std::string& strategy, int max_uniform_segments, Index max_ragged_blocks,
                      Index segment_cost, Index ragged_segment_cost, Index ragged_block_cost) {
            return plan::PlanOptions{
                .strategy = parse_strategy(strategy),
                .max_uniform_segments = max_uniform_segments,
                .max_ragged_blocks = max_ragged_blocks,
                .cost = {
                    .uniform_segment = segment_cost,
                    .ragged_segment = ragged_segment_cost,
                    .ragged_block = ragged_block_cost}};
          }),
          py::arg("strategy"), py::arg("max_uniform_segments"), py::arg("max_ragged_blocks"), py::arg("segment_cost"),
          py::arg("ragged_segment_cost"), py::arg("ragged_block_cost"));
  module.def(
      "plan_bucket",
      [](std::vector<std::string> names, std::vector<std::vector<Index>> shapes, std::vector<bool> trainable,
         std::vector<std::optional<std::tuple<std::string, Index, Index>>> blocks, int world_size, Index element_bytes,
         const plan::PlanOptions& options) {
        return plan_bucket(
            {std::move(names), std::move(shapes), std::move(trainable), std::move(blocks)}, world_size, element_bytes,
            options);
      },
      "(JSON, text, numbers) of a bucket's plan; `element_bytes` of the narrowest dtype that travels.",
      py::arg("names"), py::arg("shapes"), py::arg("trainable"), py::arg("blocks"), py::arg("world_size"),
      py::arg("element_bytes"), py::arg("options"));
}

void bind_group(py::module_& module) {
  py::class_<comm::Communicator>(module, "Communicator")
      .def(
          py::init(&make_communicator), py::arg("group_name"), py::arg("device"), py::arg("name"),
          py::arg("stock") = false, py::arg("check_order") = false)
      .def_property_readonly("rank", &comm::Communicator::rank)
      .def_property_readonly("size", &comm::Communicator::size)
      .def_property_readonly("is_stock", &comm::Communicator::is_stock)
      .def("broadcast", [](const comm::Communicator& c, const at::Tensor& tensor, int root, const std::string& unit) {
        py::gil_scoped_release no_gil;
        c.broadcast(tensor, root, unit).wait();
      });
  py::class_<comm::MeshGroups>(module, "MeshGroups")
      .def(
          py::init(&make_groups), py::arg("shard"), py::arg("replicate"), py::arg("ranks"), py::arg("rank"),
          py::arg("device"));
  py::class_<PythonParam>(module, "PythonParam")
      .def(
          py::init([](py::object sharded, py::object unsharded, py::object spec,
                      std::vector<std::pair<py::dict, py::str>> places) {
            return PythonParam{std::move(sharded), std::move(unsharded), std::move(spec), std::move(places)};
          }),
          py::arg("sharded"), py::arg("unsharded"), py::arg("gradient_spec"), py::arg("places"));
  py::class_<PythonCalls>(module, "PythonCalls")
      .def(
          py::init([](py::object wrap, py::object dense, py::object local, py::object hooks) {
            return PythonCalls{std::move(wrap), std::move(dense), std::move(local), std::move(hooks)};
          }),
          py::arg("wrap"), py::arg("dense_gradient"), py::arg("local_gradient"), py::arg("run_hooks"));
  py::class_<ParamGroup, Group>(module, "ParamGroup")
      .def(
          py::init([](std::vector<std::string> names, std::vector<std::vector<Index>> shapes,
                      std::vector<bool> requires_grad,
                      std::vector<std::optional<std::tuple<std::string, Index, Index>>> blocks, at::ScalarType dtype,
                      std::optional<at::ScalarType> param_dtype, std::optional<at::ScalarType> reduce_dtype,
                      const comm::MeshGroups& groups, const std::vector<std::optional<at::Tensor>>& values,
                      bool front_holds_values, bool offload, bool pin_memory, const plan::PlanOptions& planning) {
            return make_group(
                {std::move(names), std::move(shapes), std::move(requires_grad), std::move(blocks)}, dtype, param_dtype,
                reduce_dtype, groups, values, front_holds_values, {.enabled = offload, .pin_memory = pin_memory},
                planning);
          }),
          py::arg("names"), py::arg("shapes"), py::arg("requires_grad"), py::arg("blocks"), py::arg("dtype"),
          py::arg("param_dtype"), py::arg("reduce_dtype"), py::arg("groups"), py::arg("values"),
          py::arg("front_holds_values") = false, py::arg("offload") = false, py::arg("pin_memory") = false,
          py::arg("planning") = plan::PlanOptions{})
      .def("set_front", &set_front, py::arg("params"), py::arg("calls"), py::arg("gatherer") = py::none())
      .def(
          "set_sharded",
          [](ParamGroup& group, int param, py::object sharded) {
            static_cast<PythonFront&>(*group.front()).set_sharded(param, std::move(sharded));
          })
      .def("image", &ParamGroup::image, "Parameter i of the unsharded image; its bytes come and go.")
      .def("master", [](ParamGroup& group, int param) { return group.masters().tensor(param); })
      .def("flat_masters", [](ParamGroup& group) { return group.masters().flat(); })
      .def("flat_grads", [](ParamGroup& group) { return group.grads().flat(); })
      .def("set_master", &ParamGroup::set_master, ReleaseGil())
      .def("mark_initialised", &ParamGroup::mark_initialised)
      .def("bump_master_version", &ParamGroup::bump_master_version)
      .def(
          "placement",
          [](const ParamGroup& group, int param) {
            const layout::RaggedShard placement = group.plan().placement(param);
            return std::pair{placement.dims(), placement.local_units()};
          },
          "(dims, units) of parameter i over the shard dim.")
      .def("set_small_group", &ParamGroup::set_small_group)
      .def(
          "converted",
          [](const ParamGroup& group, at::ScalarType dtype, std::optional<at::ScalarType> param_dtype,
             std::optional<at::ScalarType> reduce_dtype) {
            return group.converted(dtype, param_dtype.value_or(dtype), reduce_dtype.value_or(dtype));
          },
          py::arg("dtype"), py::arg("param_dtype"), py::arg("reduce_dtype"))
      .def("rename", &ParamGroup::rename)
      .def_property_readonly("is_sharded", [](const ParamGroup& g) { return g.state() == fsdp::ShardState::kSharded; })
      .def_property_readonly("image_bytes", &ParamGroup::image_bytes)
      .def_property_readonly("plan_text", [](const ParamGroup& g) { return plan::to_string(g.plan()); })
      .def_property_readonly("plan_json", [](const ParamGroup& g) { return plan::to_json(g.plan()); })
      .def_property_readonly("padding", [](const ParamGroup& g) { return g.plan().padding(); })
      .def_property_readonly("image_numel", [](const ParamGroup& g) { return g.plan().image_numel(); })
      .def_property_readonly(
          "local_numel", [](const ParamGroup& g) { return g.plan().local_numel(g.spec().groups.shard.rank()); })
      .def_property(
          "gradients_in_place", [](const ParamGroup& group) { return in_place_name(group.gradients_in_place); },
          [](ParamGroup& group, const std::string& name) { group.gradients_in_place = parse_in_place(name); })
      .def_readwrite("requires_gradient_sync", &ParamGroup::requires_gradient_sync)
      .def_readwrite("requires_all_reduce", &ParamGroup::requires_all_reduce)
      .def_readwrite("reshard_after_forward", &ParamGroup::reshard_after_forward)
      .def_readwrite("reshard_after_backward", &ParamGroup::reshard_after_backward)
      .def_property(
          "gradients_over_weights",
          [](const ParamGroup& group) { return group.gradient_memory == fsdp::GradientMemory::kOverWeights; },
          [](ParamGroup& group, bool value) {
            group.gradient_memory = value ? fsdp::GradientMemory::kOverWeights : fsdp::GradientMemory::kOwn;
          })
      .def_readwrite("is_behind", &ParamGroup::is_behind)
      .def_readwrite("reshards_when_unheld", &ParamGroup::reshards_when_unheld)
      .def_readwrite("gradient_divide_factor", &ParamGroup::gradient_divide_factor)
      .def("set_all_reduce_hook", [](ParamGroup& group, std::optional<py::function> hook) {
        if (!hook) {
          group.all_reduce_hook = nullptr;
          return;
        }
        // Destroyed with the group, maybe without the GIL.
        const std::shared_ptr<py::function> held(new py::function(*hook), [](py::function* function) {
          py::gil_scoped_acquire gil;
          delete function;
        });
        group.all_reduce_hook = [held](const at::Tensor& flat) { with_gil([&] { (*held)(flat); }); };
      });
}

void bind_runtime(py::module_& module) {
  py::class_<fsdp::RuntimeUnit>(module, "RuntimeUnit")
      .def(
          py::init([](std::string name, int parent, std::vector<Group> groups,
                      std::optional<at::ScalarType> param_dtype, std::optional<at::ScalarType> output_dtype,
                      bool cast_forward_inputs) {
            fsdp::RuntimeUnit unit;
            unit.name = std::move(name);
            unit.parent = parent;
            unit.groups = std::move(groups);
            unit.mixed_precision = {
                .param_dtype = param_dtype, .output_dtype = output_dtype, .cast_forward_inputs = cast_forward_inputs};
            return unit;
          }),
          py::arg("name"), py::arg("parent"), py::arg("groups"), py::arg("param_dtype"), py::arg("output_dtype"),
          py::arg("cast_forward_inputs"));
  py::class_<Runtime, std::shared_ptr<Runtime>>(module, "Runtime")
      .def(
          py::init([](std::vector<fsdp::RuntimeUnit> units, const comm::MeshGroups& groups,
                      const std::shared_ptr<Runtime>& shares) {
            return std::make_shared<Runtime>(std::move(units), groups, fsdp::RuntimeOptions{}, shares.get());
          }),
          py::arg("units"), py::arg("groups"), py::arg("shares") = nullptr)
      .def_property_readonly(
          "gives_memory_back",
          [](const Runtime& runtime) { return runtime.options.free_slots == buffer::FreeSlots::kReturn; },
          "Whether what nobody needs goes back to the allocator, images of units around others included.")
      .def(
          "pre_forward",
          [](Runtime& runtime, int unit, std::vector<at::Tensor> tensors) {
            return over(std::move(tensors), [&](const fsdp::TensorRefs& refs) { runtime.pre_forward(unit, refs); });
          },
          "Gathers; returns the tensors that replace the inputs, None when none changes.")
      .def(
          "post_forward",
          [](Runtime& runtime, int unit, std::vector<at::Tensor> tensors, bool may_reshard) {
            return over(std::move(tensors), [&](const fsdp::TensorRefs& refs) {
              runtime.post_forward(unit, refs, may_reshard);
            });
          })
      .def("check_ranks_agree", &Runtime::check_ranks_agree, ReleaseGil())
      .def("unshard", &Runtime::unshard, ReleaseGil())
      .def("wait_for_unshard", &Runtime::wait_for_unshard, ReleaseGil())
      .def("reshard", &Runtime::reshard, ReleaseGil())
      .def("unshard_again", &Runtime::unshard_again, ReleaseGil())
      .def("finish_backward", &Runtime::finish_backward, ReleaseGil())
      .def("reset", &Runtime::reset, ReleaseGil())
      .def("reset_peaks", [](Runtime& runtime) { runtime.pool().reset_peaks(); })
      .def("stats", &stats_of)
      .def("forecast", &forecast_of, py::arg("micro_batches") = 1, py::arg("sync_each") = false)
      .def_readwrite("is_last_backward", &Runtime::is_last_backward)
      .def(
          "set_prefetch",
          [](Runtime& runtime, int unit, std::vector<int> forward, std::vector<int> backward) {
            runtime.unit(unit).forward_prefetch = std::move(forward);
            runtime.unit(unit).backward_prefetch = std::move(backward);
          })
      .def(
          "set_unshard_in_backward",
          [](Runtime& runtime, int unit, bool value) { runtime.unit(unit).unshard_in_backward = value; })
      .def("set_static_use", [](Runtime& runtime, bool value) { runtime.options.static_use = value; })
      .def("set_merge_bytes", [](Runtime& runtime, std::optional<Index> bytes) {
        fsdp::RuntimeOptions options = runtime.options;
        options.merge_bytes = bytes;
        runtime.set_options(options);
      });
}

}  // namespace

void bind_in_place(py::module_& module) {
  module.def(
      "linear",
      [](const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
        py::gil_scoped_release no_gil;
        return fsdp::linear(x, weight, bias);
      },
      "F.linear, whose weight's gradient is computed in place where it can be.", py::arg("x"), py::arg("weight"),
      py::arg("bias"));
  module.def(
      "embedding",
      [](const at::Tensor& weight, const at::Tensor& indices, Index padding_index) {
        py::gil_scoped_release no_gil;
        return fsdp::embedding(weight, indices, padding_index);
      },
      "F.embedding, likewise; -1: no padding.", py::arg("weight"), py::arg("indices"), py::arg("padding_index"));
}

void bind_fsdp(py::module_& module) {
  bind_planning(module);
  bind_group(module);
  bind_in_place(module);
  bind_runtime(module);
}

}  // namespace ragged::python
