#include "ragged/fsdp/runtime.h"

#include <algorithm>
#include <cstdio>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "ragged/base/error.h"

namespace ragged::fsdp {
namespace {

namespace ag = torch::autograd;

struct Callback : torch::CustomClassHolder {
  std::function<void()> run;
  explicit Callback(std::function<void()> f) : run(std::move(f)) {}
};

// Identity whose backward is a side effect: how a unit learns that gradients have reached its inputs.
struct MarkBackward : ag::Function<MarkBackward> {
  static ag::variable_list forward(
      ag::AutogradContext* ctx, const c10::intrusive_ptr<Callback>& callback, at::TensorList tensors) {
    ctx->saved_data["callback"] = c10::IValue::make_capsule(callback);
    ag::variable_list same;
    for (const at::Tensor& tensor : tensors) same.push_back(tensor.view_as(tensor));
    return same;
  }
  static ag::variable_list backward(ag::AutogradContext* ctx, ag::variable_list grads) {
    c10::static_intrusive_pointer_cast<Callback>(ctx->saved_data["callback"].toCapsule())->run();
    grads.insert(grads.begin(), at::Tensor());  // for the callback's place
    return grads;
  }
};

void cast_floating(const TensorRefs& refs, std::optional<at::ScalarType> dtype) {
  if (!dtype) return;
  for (at::Tensor* tensor : refs) {
    if (tensor->is_floating_point() && tensor->scalar_type() != *dtype) *tensor = tensor->to(*dtype);
  }
}

}  // namespace

Runtime::Runtime(std::vector<RuntimeUnit> units, comm::MeshGroups groups, RuntimeOptions runtime_options)
    : options(runtime_options),
      units_(std::move(units)),
      subtree_trains_(units_.size(), 0),
      groups_(std::move(groups)),
      pending_reductions_(units_.size(), 0) {
  auto* carrier = groups_.shard.process_group().get();
  pool_ = buffer::BufferPool::create(buffer::default_allocator(), groups_.device, carrier);
  if (!groups_.device.is_cpu()) {
    gather_stream_ = c10::impl::VirtualGuardImpl(groups_.device.type()).getStreamFromGlobalPool(groups_.device);
  }
  if (!units_[0].has_explicit_reshard && units_[0].group) units_[0].group->reshard_after_forward = false;
  make_slots();
}

Runtime::~Runtime() = default;

// See [Note: slots]: units without descendants share classes, the others have their own.
void Runtime::make_slots() {
  std::vector<char> is_ancestor(units_.size(), 0);
  for (const RuntimeUnit& unit : units_) {
    if (unit.parent >= 0) is_ancestor[static_cast<std::size_t>(unit.parent)] = true;
  }
  Index leaf_image = 0;
  Index leaf_reduce = 0;
  Index staging = 0;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const auto& group = units_[u].group;
    if (!group) continue;
    staging = std::max(staging, group->staging_bytes());
    if (is_ancestor[u]) continue;
    leaf_reduce = std::max(leaf_reduce, group->reduce_bytes());
    if (group->reshard_after_forward) leaf_image = std::max(leaf_image, group->image_bytes());
  }
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const auto& group = units_[u].group;
    if (!group) continue;
    const bool shares_image = !is_ancestor[u] && group->reshard_after_forward;
    group->set_slots(
        {.pool = pool_,
         .image = pool_->add_class(buffer::SlotUse::kImage, shares_image ? leaf_image : group->image_bytes()),
         .reduce = pool_->add_class(buffer::SlotUse::kReduce, is_ancestor[u] ? group->reduce_bytes() : leaf_reduce),
         .staging = pool_->add_class(buffer::SlotUse::kStaging, staging),
         .gradient = pool_->add_class(buffer::SlotUse::kGradient, group->gradient_bytes()),
         .gather_stream = gather_stream_});
  }
}

ParamGroup::GradientReady Runtime::gradient_hook(int index) {
  return [runtime = weak_from_this(), index](int param) {
    if (auto alive = runtime.lock()) alive->gradient_ready(index, param);
  };
}

void Runtime::check_ranks_agree() {
  if (checked_) return;
  checked_ = true;
  for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
    if (unit(u).group) unit(u).group->hook_gradients(gradient_hook(u));
  }
  // The greatest of x and of ~x over ranks: equal to our own x and ~x only if all are equal.
  std::vector<std::int64_t> mine;
  for (const RuntimeUnit& unit : units_) {
    if (!unit.group) continue;
    for (const std::uint64_t value : {plan::hash(unit.group->plan()), unit.group->checksum()}) {
      mine.push_back(static_cast<std::int64_t>(value));
      mine.push_back(static_cast<std::int64_t>(~value));
    }
  }
  if (mine.empty() || (groups_.shard.size() == 1 && groups_.replicate.size() == 1)) return;
  at::Tensor greatest = at::tensor(mine, at::kLong).to(groups_.device);
  groups_.shard.all_reduce_max(greatest, "plans").wait();
  groups_.replicate.all_reduce_max(greatest, "plans").wait();
  greatest = greatest.cpu();
  const auto* theirs = greatest.const_data_ptr<std::int64_t>();
  std::size_t at = 0;
  for (const RuntimeUnit& unit : units_) {
    if (!unit.group) continue;
    const bool plans_agree = theirs[at] == mine[at] && theirs[at + 1] == mine[at + 1];
    const bool values_agree = theirs[at + 2] == mine[at + 2] && theirs[at + 3] == mine[at + 3];
    at += 4;
    RAGGED_CHECK(
        plans_agree,
        "[fully_shard] Expected all ranks to plan unit '{}' alike, but got different plans (rank {} of {}). The "
        "shapes, "
        "the shard policy or the dtypes depend on the rank.",
        unit.name, groups_.rank, groups_.mesh.size());
    if (!values_agree && groups_.rank == groups_.mesh.ranks().front()) {
      std::fprintf(
          stderr,
          "ragged: warning: ranks initialised unit '%s' with different values before sharding it; each rank's part "
          "is kept. Seed all ranks alike, or set sync_from_rank0.\n",
          unit.name.c_str());
    }
  }
}

// ---- forward ----

void Runtime::begin_forward() {
  if (in_forward_ || backward_failed()) reset();
  check_ranks_agree();
  std::fill(subtree_trains_.begin(), subtree_trains_.end(), 0);
  for (std::size_t u = units_.size(); u-- > 0;) {
    RuntimeUnit& unit = units_[u];
    if (unit.group && unit.group->refresh_trainable(gradient_hook(static_cast<int>(u)))) subtree_trains_[u] = true;
    if (unit.parent >= 0 && subtree_trains_[u]) subtree_trains_[static_cast<std::size_t>(unit.parent)] = true;
  }
  if (gather_stream_) {  // what the optimizer wrote must be there before it is gathered
    const buffer::CompletionToken written = buffer::CompletionToken::record(groups_.device);
    const c10::StreamGuard on_gather_stream(*gather_stream_);
    written.wait();
  }
  in_forward_ = true;
  order_.clear();
  prefetched_ = 0;
  record_.reset();
  if (at::GradMode::is_enabled()) {
    record_ = std::make_shared<ForwardRecord>();
    record_->id = next_record_++;
  }
}

bool Runtime::needs_backward(int unit, const TensorRefs& inputs) const {
  if (subtree_trains_[static_cast<std::size_t>(unit)]) return true;
  return std::any_of(inputs.begin(), inputs.end(), [](const at::Tensor* t) { return t->requires_grad(); });
}

int Runtime::pre_forward(int index, const TensorRefs& inputs) {
  RuntimeUnit& u = unit(index);
  if (index == 0) {
    begin_forward();
  } else {
    RAGGED_CHECK(
        in_forward_,
        "[forward] Expected unit '{}' to run inside its root's forward, but got a call from outside. Run the root, or "
        "call unshard() and use the module itself.",
        u.name);
  }
  if (u.mixed_precision.cast_forward_inputs) cast_floating(inputs, u.mixed_precision.param_dtype);
  int call = -1;
  if (record_) call = record_->begin_call(index, needs_backward(index, inputs));
  order_.push_back(index);
  if (u.group) u.group->unshard();
  prefetch_forward(index);
  if (u.group) u.group->wait_for_unshard();

  if (!record_) return call;
  std::vector<at::Tensor> differentiable;
  for (const at::Tensor* input : inputs) {
    if (input->requires_grad()) differentiable.push_back(*input);
  }
  if (differentiable.empty()) return call;
  auto callback = c10::make_intrusive<Callback>([weak = weak_from_this(), record = record_, call] {
    if (auto runtime = weak.lock()) runtime->post_backward(record, call);
  });
  const ag::variable_list marked = MarkBackward::apply(callback, at::TensorList(differentiable));
  std::size_t next = 0;
  for (at::Tensor* input : inputs) {
    if (input->requires_grad()) *input = marked[next++];
  }
  return call;
}

// Gathers ahead in the order of the last forward, as long as this one follows it. All ranks that run the same units
// in the same order issue the same gathers.
void Runtime::prefetch_forward(int index) {
  const std::size_t position = order_.size() - 1;
  if (options.forward_prefetch <= 0 || position >= last_order_.size() || last_order_[position] != index) return;
  const std::size_t until =
      std::min(last_order_.size(), position + 1 + static_cast<std::size_t>(options.forward_prefetch));
  for (std::size_t i = std::max(position + 1, prefetched_); i < until; ++i) {
    const auto& group = unit(last_order_[i]).group;
    if (group) group->unshard();
    prefetched_ = i + 1;
  }
}

void Runtime::post_forward(int index, int call, const TensorRefs& outputs) {
  RuntimeUnit& u = unit(index);
  cast_floating(outputs, u.mixed_precision.output_dtype);
  if (record_) {
    record_->end_call(index);
    for (const at::Tensor* output : outputs) {
      if (!output->requires_grad()) continue;
      output->register_hook([weak = weak_from_this(), record = record_, call](const at::Tensor&) {
        if (auto runtime = weak.lock()) runtime->pre_backward(record, call);
      });
    }
  }
  if (u.group && u.group->reshard_after_forward) u.group->reshard();
  if (index == 0) end_forward();
}

void Runtime::end_forward() {
  in_forward_ = false;
  last_order_ = order_;
  record_.reset();
  // A prefetched unit that this forward didn't run after all.
  for (RuntimeUnit& unit : units_) {
    if (unit.group && unit.group->state() == ShardState::kUnsharding) unit.group->reshard();
  }
}

void Runtime::abort_forward(int index, int call) noexcept {
  if (index == 0) return;  // in_forward_ stays set: the next forward recovers
  try {
    RuntimeUnit& u = unit(index);
    if (record_ && call >= 0) {
      record_->drop_call(call);  // the model may catch and go on
      record_->end_call(index);
    }
    if (u.group && u.group->reshard_after_forward) u.group->reshard();
  } catch (...) {  // NOLINT(bugprone-empty-catch): the exception that unwinds us is the one to report
  }
}

// ---- backward ----

bool Runtime::backward_failed() const {
  return backward_task_ != -1 && ag::get_current_graph_task_id() == -1;
}

void Runtime::activate(const Record& record) {
  if (std::find(active_.begin(), active_.end(), record) != active_.end()) return;
  // A forward that came later is done by now but for its root; ranks must agree on what is resident.
  for (const Record& other : active_) advance(*other, std::max(other->cursor, other->list.tail));
  std::vector<UnitTraits> traits;
  for (const RuntimeUnit& unit : units_) {
    UnitTraits t;
    t.has_params = unit.group != nullptr;
    if (unit.group) {
      t.reduces = unit.group->grads().segments().size() > 0;
      t.reshard_after_forward = unit.group->reshard_after_forward;
      t.resident = unit.group->state() != ShardState::kSharded;
    }
    traits.push_back(t);
  }
  record->list = build_issue_list(record->events, traits, options.backward_prefetch);
  record->cursor = 0;
  record->reached.assign(record->call_units.size(), 0);
  for (const Issue& issue : record->list.issues) {
    if (issue.kind == IssueKind::kReduce) ++pending_reductions_[static_cast<std::size_t>(issue.unit)];
  }
  active_.push_back(record);
  if (backward_task_ != -1) return;
  backward_task_ = ag::get_current_graph_task_id();
  ag::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (auto runtime = weak.lock()) runtime->sweep();
  });
}

void Runtime::pre_backward(const Record& record, int call) {
  if (backward_task_ != -1 && backward_task_ != ag::get_current_graph_task_id()) reset();
  activate(record);
  char& reached = record->reached[static_cast<std::size_t>(call)];
  if (reached) return;
  reached = true;
  const at::NoGradGuard no_grad;
  advance(*record, record->list.pre_backward[static_cast<std::size_t>(call)]);
  const auto& group = unit(record->call_units[static_cast<std::size_t>(call)]).group;
  if (group) group->wait_for_unshard();
}

void Runtime::post_backward(const Record& record, int call) {
  if (std::find(active_.begin(), active_.end(), record) == active_.end()) return;
  const at::NoGradGuard no_grad;
  advance(*record, record->list.post_backward[static_cast<std::size_t>(call)]);
}

void Runtime::gradient_ready(int index, int param) {
  RuntimeUnit& u = unit(index);
  RAGGED_CHECK(
      pending_reductions_[static_cast<std::size_t>(index)] > 0,
      "[backward] Expected the gradient of '{}' while its unit '{}' is in backward, but got it {} (rank {}). Use the "
      "unit's parameters only inside its forward, and let outputs that lead to the loss be returned from it.",
      u.group->plan().params[static_cast<std::size_t>(param)].name, u.name,
      active_.empty() ? "outside a backward of the root" : "after the unit was reduced", groups_.rank);
  u.group->take_gradient(param);
}

void Runtime::advance(ForwardRecord& record, int target, bool skip_gathers) {
  while (record.cursor < target) {
    const Issue issue = record.list.issues[static_cast<std::size_t>(record.cursor++)];
    ParamGroup& group = *unit(issue.unit).group;
    switch (issue.kind) {
      case IssueKind::kGather:
        if (!skip_gathers) group.unshard();
        break;
      case IssueKind::kReshard:
        group.reshard();
        break;
      case IssueKind::kReduce:
        --pending_reductions_[static_cast<std::size_t>(issue.unit)];
        if (group.requires_gradient_sync) issue_reduction(issue.unit);
        break;
    }
  }
}

// At most one scatter and one all-reduce are in flight: their buffers are the ones the plan counts.
void Runtime::issue_reduction(int index) {
  if (scattering_ >= 0) {
    if (all_reducing_ >= 0 && all_reducing_ != scattering_) unit(all_reducing_).group->finish_reduction();
    unit(scattering_).group->finish_scatter();
    all_reducing_ = scattering_;
    // Without replicas nothing is left to wait for; finishing now lets the same unit be reduced again.
    if (groups_.replicate.size() == 1 || all_reducing_ == index) unit(all_reducing_).group->finish_reduction();
  }
  unit(index).group->issue_reduction();
  scattering_ = index;
  if (std::find(reduced_.begin(), reduced_.end(), index) == reduced_.end()) reduced_.push_back(index);
}

void Runtime::sweep() {
  const at::NoGradGuard no_grad;
  comm::ProfilerRange range("ragged::sweep", units_[0].name);
  std::sort(active_.begin(), active_.end(), [](const Record& a, const Record& b) { return a->id > b->id; });
  for (const Record& record : active_) {
    advance(*record, static_cast<int>(record->list.issues.size()), groups_.shard.is_stock());
  }
  publish_gradients();
  active_.clear();
  backward_task_ = -1;
}

// Used-flags of all units travel together, once a backward: a parameter has a gradient if any rank used it.
void Runtime::publish_gradients() {
  std::vector<ParamGroup*> ready;
  std::sort(reduced_.begin(), reduced_.end());
  // In the order their all-reduces may still be issued: the one that scatters comes last.
  for (const int index : {all_reducing_, scattering_}) {
    if (index >= 0) unit(index).group->finish_scatter();
  }
  std::vector<char> used;
  for (const int index : reduced_) {
    ParamGroup& group = *unit(index).group;
    group.finish_reduction();
    if (!group.result_is_ready()) continue;
    ready.push_back(&group);
    used.insert(used.end(), group.used().begin(), group.used().end());
  }
  scattering_ = -1;
  all_reducing_ = -1;
  reduced_.clear();
  if (ready.empty()) return;
  const bool exchange =
      !options.static_use && !groups_.shard.is_stock() && (groups_.shard.size() > 1 || groups_.replicate.size() > 1);
  if (exchange) {
    at::Tensor flags = at::from_blob(used.data(), {static_cast<Index>(used.size())}, at::kByte).to(groups_.device);
    groups_.shard.all_reduce_max(flags, "used parameters").wait();
    groups_.replicate.all_reduce_max(flags, "used parameters").wait();
    const at::Tensor host = flags.cpu();
    std::copy_n(reinterpret_cast<const char*>(host.const_data_ptr<std::uint8_t>()), used.size(), used.data());
  }
  const char* flags = used.data();
  for (ParamGroup* group : ready) {
    group->publish(flags);
    flags += group->used().size();
  }
}

void Runtime::reset() {
  for (RuntimeUnit& unit : units_) {
    if (unit.group) unit.group->abandon();
  }
  std::fill(pending_reductions_.begin(), pending_reductions_.end(), 0);
  active_.clear();
  reduced_.clear();
  scattering_ = -1;
  all_reducing_ = -1;
  backward_task_ = -1;
  in_forward_ = false;
  record_.reset();
  last_order_.clear();
}

StepForecast Runtime::forecast(int micro_batches, bool sync_each) const {
  std::vector<UnitForecastInput> inputs;
  std::vector<int> parents;
  for (const RuntimeUnit& unit : units_) {
    UnitForecastInput input;
    input.name = unit.name;
    input.parent = unit.parent;
    if (unit.group) {
      input.plan = &unit.group->plan();
      input.param_bytes = static_cast<Index>(c10::elementSize(unit.group->spec().param_dtype));
      input.reduce_bytes = static_cast<Index>(c10::elementSize(unit.group->spec().reduce_dtype));
      input.reshard_after_forward = unit.group->reshard_after_forward;
    }
    inputs.push_back(input);
    parents.push_back(unit.parent);
  }
  return forecast_step(
      inputs, module_order_events(parents),
      {.rank = groups_.shard.rank(),
       .backward_prefetch = options.backward_prefetch,
       .forward_prefetch = options.forward_prefetch,
       .micro_batches = micro_batches,
       .sync_each_micro_batch = sync_each});
}

}  // namespace ragged::fsdp
