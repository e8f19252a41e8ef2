#include "ragged/fsdp/runtime.h"

#include <algorithm>
#include <cstdio>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "ragged/base/error.h"
#include "ragged/fsdp/graph_hooks.h"

namespace ragged::fsdp {
namespace {

void cast_floating(const TensorRefs& refs, std::optional<at::ScalarType> dtype) {
  if (!dtype) return;
  for (at::Tensor* tensor : refs) {
    if (tensor->is_floating_point() && tensor->scalar_type() != *dtype) *tensor = tensor->to(*dtype);
  }
}

}  // namespace

bool RuntimeUnit::trains() const {
  return std::any_of(groups.begin(), groups.end(), [](const auto& group) { return group->reduces(); });
}

Runtime::Runtime(
    std::vector<RuntimeUnit> units, comm::MeshGroups groups, RuntimeOptions runtime_options, const Runtime* shares)
    : options(runtime_options.on(groups.device)),
      units_(std::move(units)),
      subtree_trains_(units_.size(), 0),
      groups_(std::move(groups)),
      pending_reductions_(units_.size(), 0),
      unreduced_(units_.size(), 0),
      behind_reduced_(units_.size(), 0),
      active_calls_(units_.size(), 0) {
  if (shares) {
    pool_ = shares->pool_;
    gather_stream_ = shares->gather_stream_;
  } else {
    auto* carrier = groups_.shard.process_group().get();
    pool_ = buffer::BufferPool::create(buffer::default_allocator(), groups_.device, carrier);
    if (!groups_.device.is_cpu()) {
      gather_stream_ = c10::impl::VirtualGuardImpl(groups_.device.type()).getStreamFromGlobalPool(groups_.device);
    }
  }
  pool_->set_free_slots(*options.free_slots);
  make_slots();
}

Runtime::~Runtime() = default;

void Runtime::set_options(const RuntimeOptions& value) {
  const Index limit = merge_limit();
  const RuntimeOptions chosen = value.on(groups_.device);
  pool_->set_free_slots(*chosen.free_slots);
  options = chosen;
  if (merge_limit() != limit) make_slots();
}

// See [Note: slots]: units without descendants share classes, the others have their own. So have small ones, of which
// many are alive at once where they merge.
void Runtime::make_slots() {
  std::vector<int> parents;
  for (const RuntimeUnit& unit : units_) parents.push_back(unit.parent);
  const std::vector<char> is_ancestor = ancestors(parents);
  Index leaf_image = 0;
  Index leaf_reduce = 0;
  Index staging = 0;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    for (const auto& group : units_[u].groups) {
      staging = std::max(staging, group->staging_bytes());
      if (is_ancestor[u]) continue;
      if (!is_small(reduce_merge(units_[u]))) leaf_reduce = std::max(leaf_reduce, group->reduce_bytes());
      if (group->reshard_after_forward && !is_small(gather_merge(units_[u]))) {
        leaf_image = std::max(leaf_image, group->image_bytes());
      }
    }
  }
  for (std::size_t u = 0; u < units_.size(); ++u) {
    for (const auto& group : units_[u].groups) {
      const bool shares_image = !is_ancestor[u] && group->reshard_after_forward && !is_small(gather_merge(units_[u]));
      const bool shares_reduce = !is_ancestor[u] && !is_small(reduce_merge(units_[u]));
      group->set_slots(
          {.pool = pool_,
           .image = pool_->add_class(buffer::SlotUse::kImage, shares_image ? leaf_image : group->image_bytes()),
           .reduce = pool_->add_class(buffer::SlotUse::kReduce, shares_reduce ? leaf_reduce : group->reduce_bytes()),
           .staging = pool_->add_class(buffer::SlotUse::kStaging, staging),
           .gradient = pool_->add_class(buffer::SlotUse::kGradient, group->gradient_bytes()),
           .kept = pool_->add_class(buffer::SlotUse::kImage, group->kept_bytes()),
           .gather_stream = gather_stream_});
    }
  }
}

ParamGroup::GradientReady Runtime::gradient_hook(int unit, int group) {
  return [runtime = weak_from_this(), unit, group](int param, ParamGroup::GradientEvent event) {
    if (auto alive = runtime.lock()) alive->gradient_ready(unit, group, param, event);
  };
}

void Runtime::check_ranks_agree() {
  if (checked_) return;
  checked_ = true;
  for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
    for (int g = 0; g < static_cast<int>(unit(u).groups.size()); ++g) {
      unit(u).groups[static_cast<std::size_t>(g)]->hook_gradients(gradient_hook(u, g));
    }
  }
  // The greatest of x and of ~x over ranks: equal to our own x and ~x only if all are equal.
  std::vector<std::int64_t> mine;
  for (const RuntimeUnit& unit : units_) {
    for (const auto& group : unit.groups) {
      for (const std::uint64_t value : {plan::hash(group->plan()), group->checksum()}) {
        mine.push_back(static_cast<std::int64_t>(value));
        mine.push_back(static_cast<std::int64_t>(~value));
      }
    }
  }
  const bool alone = groups_.shard.size() == 1 && groups_.replicate.size() == 1;
  if (mine.empty() || alone || groups_.shard.is_stock()) return;
  at::Tensor greatest = at::tensor(mine, at::kLong).to(groups_.device);
  groups_.shard.all_reduce_max(greatest, "plans").wait();
  groups_.replicate.all_reduce_max(greatest, "plans").wait();
  greatest = greatest.cpu();
  const auto* theirs = greatest.const_data_ptr<std::int64_t>();
  std::size_t at = 0;
  for (const RuntimeUnit& unit : units_) {
    bool plans_agree = true;
    bool values_agree = true;
    for (std::size_t g = 0; g < unit.groups.size(); ++g, at += 4) {
      plans_agree = plans_agree && theirs[at] == mine[at] && theirs[at + 1] == mine[at + 1];
      values_agree = values_agree && theirs[at + 2] == mine[at + 2] && theirs[at + 3] == mine[at + 3];
    }
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
  if (backward_failed()) reset();
  check_ranks_agree();
  std::fill(subtree_trains_.begin(), subtree_trains_.end(), 0);
  for (std::size_t u = units_.size(); u-- > 0;) {
    const RuntimeUnit& unit = units_[u];
    for (std::size_t g = 0; g < unit.groups.size(); ++g) {
      unit.groups[g]->follow_gradients();
      const auto ready = gradient_hook(static_cast<int>(u), static_cast<int>(g));
      if (unit.groups[g]->refresh_trainable(ready)) subtree_trains_[u] = true;
    }
    if (unit.parent >= 0 && subtree_trains_[u]) subtree_trains_[static_cast<std::size_t>(unit.parent)] = true;
  }
  if (gather_stream_) {  // what the optimizer wrote must be there before it is gathered
    const buffer::CompletionToken written = buffer::CompletionToken::record(groups_.device);
    const c10::StreamGuard on_gather_stream(*gather_stream_);
    written.wait();
  }
  order_.clear();
  gathered_ahead_.clear();
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

void Runtime::pre_forward(int index, const TensorRefs& inputs) {
  RuntimeUnit& u = unit(index);
  if (u.mixed_precision.cast_forward_inputs) cast_floating(inputs, u.mixed_precision.param_dtype);
  if (index == 0 && !open_.empty() && !open_.front().recomputes) reset();  // a forward that failed
  if (open_.empty() || open_.back().recomputes) {
    if (backward_is_running()) return begin_recomputation(index, inputs);
    open_.clear();
    begin_forward();
  }
  OpenCall open{.unit = index, .record = record_};
  if (record_) open.call = record_->begin_call(index, needs_backward(index, inputs));
  order_.push_back(index);
  open_.push_back(open);  // from here on the unit is open, whatever fails
  gather_in_forward(index);
  prefetch_forward(index);
  wait_for_unshard(index);
  mark_call(open_.back(), inputs);
}

void Runtime::mark_call(OpenCall& open, const TensorRefs& inputs) {
  if (!open.record || open.call < 0) return;
  open.inputs = mark_inputs(inputs, [weak = weak_from_this(), record = open.record, call = open.call] {
    if (auto runtime = weak.lock()) runtime->post_backward(record, call);
  });
}

void Runtime::hook_call(const OpenCall& open, const TensorRefs& outputs) {
  if (!open.record || open.call < 0) return;
  hook_graph(
      outputs, open.inputs, open.record.get(), [weak = weak_from_this(), record = open.record, call = open.call] {
        if (auto runtime = weak.lock()) runtime->pre_backward(record, call);
      });
}

// See [Note: recomputation].
void Runtime::begin_recomputation(int index, const TensorRefs& inputs) {
  OpenCall open{.unit = index, .recomputes = true};
  for (auto record = active_.rbegin(); record != active_.rend() && !open.reached; ++record) {
    const auto calls = static_cast<int>((*record)->call_units.size());
    for (int call = calls; call-- > 0 && !open.reached;) {
      const auto c = static_cast<std::size_t>(call);
      if ((*record)->call_units[c] != index || (*record)->left[c]) continue;
      open.reached = (*record)->reached[c];
      if (open.reached || open.call < 0) {
        open.record = *record;
        open.call = call;
      }
    }
  }
  open.stays = open.reached || !unit(index).is_sharded();  // gathered ahead by the list, which won't do it twice
  open_.push_back(open);
  unshard(index);
  wait_for_unshard(index);
  if (!open.reached) mark_call(open_.back(), inputs);
}

// Gathers ahead in the order of the last forward, as long as this one follows it, and what the user named. All ranks
// that run the same units in the same order issue the same gathers.
void Runtime::prefetch_forward(int index) {
  const auto gather = [&](int other) {
    if (!unit(other).is_sharded()) return;
    unshard(other);
    gathered_ahead_.push_back(other);
  };
  for (const int other : unit(index).forward_prefetch) gather(other);
  const std::size_t position = order_.size() - 1;
  if (options.forward_prefetch <= 0 || position >= last_order_.size() || last_order_[position] != index) return;
  const std::size_t until =
      std::min(last_order_.size(), position + 1 + static_cast<std::size_t>(options.forward_prefetch));
  for (std::size_t i = std::max(position + 1, prefetched_); i < until; ++i) {
    if (unit(last_order_[i]).is_sharded()) {
      gathered_ahead_.push_back(last_order_[i]);
      unshard_in_order(last_order_[i], i);
    }
    prefetched_ = i + 1;
  }
}

void Runtime::drop_open_call() {
  const OpenCall& open = open_.back();
  if (!open.recomputes && open.record) {
    open.record->drop_call(open.call);  // the model caught what it threw and went on
    open.record->end_call(open.unit);
  }
  open_.pop_back();
}

void Runtime::post_forward(int index, const TensorRefs& outputs, bool may_reshard) {
  RuntimeUnit& u = unit(index);
  const auto is_this = [index](const OpenCall& open) { return open.unit == index; };
  if (std::none_of(open_.begin(), open_.end(), is_this)) return;  // recovered from a failure in between
  while (open_.back().unit != index) drop_open_call();
  const OpenCall open = open_.back();
  cast_floating(outputs, u.mixed_precision.output_dtype);
  hook_call(open, outputs);
  if (!open.recomputes && open.record) open.record->end_call(index);
  open_.pop_back();
  if (may_reshard && !open.stays && u.reshards_after_forward()) {
    for (const auto& group : u.groups) {
      open.record ? group->reshard_to_small_group() : group->reshard();  // without a backward there is nothing to keep
    }
  }
  if (open_.empty() && !open.recomputes) end_forward();
}

void Runtime::end_forward() {
  last_order_ = order_;
  record_.reset();
  // Gathered ahead and not run after all, or kept for modules of the unit that didn't run.
  for (const std::vector<int>* units : {&gathered_ahead_, &order_}) {
    for (const int index : *units) {
      if (unit(index).reshards_after_forward() && !unit(index).is_sharded()) reshard(index);
    }
  }
}

void Runtime::abort_forward(int index) noexcept {
  if (open_.empty() || open_.front().unit == index) return;  // the whole forward failed: the next one recovers
  try {
    while (!open_.empty() && open_.back().unit != index) drop_open_call();
    if (open_.empty()) return;
    drop_open_call();
    if (unit(index).reshards_after_forward()) reshard(index);
  } catch (...) {  // NOLINT(bugprone-empty-catch): the exception that unwinds us is the one to report
  }
}

// ---- by hand ----

void Runtime::unshard(int index) {
  check_ranks_agree();
  for (const auto& group : unit(index).groups) group->unshard();
}

void Runtime::wait_for_unshard(int index) {
  for (const auto& group : unit(index).groups) group->wait_for_unshard();
}

void Runtime::reshard(int index) {
  for (const auto& group : unit(index).groups) group->reshard();
}

void Runtime::unshard_again(int index) {
  if (!backward_is_running()) return;
  for (const auto& group : unit(index).groups) group->unshard_again();
}

StepForecast Runtime::forecast(int micro_batches, bool sync_each) const {
  std::vector<UnitForecastInput> inputs;
  std::vector<int> parents;
  for (const RuntimeUnit& unit : units_) {
    UnitForecastInput input;
    input.name = unit.name;
    input.parent = unit.parent;
    input.reshard_after_forward = unit.groups.empty() || unit.reshards_after_forward();
    input.gather = gather_merge(unit);
    input.reduction = reduce_merge(unit);
    for (const auto& group : unit.groups) {
      input.groups.push_back(
          {.plan = &group->plan(),
           .param_bytes = static_cast<Index>(c10::elementSize(group->spec().param_dtype)),
           .reduce_bytes = static_cast<Index>(c10::elementSize(group->spec().reduce_dtype)),
           .gathers_from_masters = group->gathers_from_masters(),
           .narrows = group->narrows_gradients(),
           .is_behind = group->is_behind});
    }
    inputs.push_back(input);
    parents.push_back(unit.parent);
  }
  return forecast_step(
      inputs, module_order_events(parents),
      {.rank = groups_.shard.rank(),
       .backward_prefetch = *options.backward_prefetch,
       .forward_prefetch = options.forward_prefetch,
       .overlap_reductions = *options.overlap_reductions,
       .drops_unheld = options.free_slots == buffer::FreeSlots::kReturn,
       .merge_bytes = merge_limit(),
       .micro_batches = micro_batches,
       .sync_each_micro_batch = sync_each});
}

}  // namespace ragged::fsdp
