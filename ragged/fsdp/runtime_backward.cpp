// Backward's half of the runtime: hooks move the cursor of the issue list, the sweep works off the rest and publishes.
#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>

#include "ragged/base/error.h"
#include "ragged/fsdp/runtime.h"

namespace ragged::fsdp {

namespace ag = torch::autograd;

void Runtime::activate(const Record& record) {
  if (std::find(active_.begin(), active_.end(), record) != active_.end()) return;
  // A forward that came later is done by now but for its root; ranks must agree on what is resident.
  for (const Record& other : active_) advance(*other, std::max(other->cursor, other->list.tail));
  std::vector<UnitTraits> traits;
  for (const RuntimeUnit& unit : units_) {
    traits.push_back(
        {.has_params = !unit.groups.empty(),
         .reduces = unit.trains(),
         .reshard_after_forward = unit.reshards_after_forward(),
         .reshard_after_backward = unit.groups.empty() || unit.groups.front()->reshard_after_backward,
         .gathers_in_backward = unit.unshard_in_backward,
         .resident = !unit.is_sharded(),
         .reduces_behind = std::any_of(
             unit.groups.begin(), unit.groups.end(),
             [](const auto& group) { return group->is_behind && group->reduces(); }),
         .prefetch = unit.backward_prefetch,
         .gather = gather_merge(unit),
         .reduction = reduce_merge(unit)});
  }
  record->list = build_issue_list(record->events, traits, *options.backward_prefetch, merge_limit());
  record->cursor = 0;
  record->reached.assign(record->call_units.size(), 0);
  record->left.assign(record->call_units.size(), 0);
  for (const Issue& issue : record->list.issues) {
    if (issue.kind == IssueKind::kReduce) ++pending_reductions_[static_cast<std::size_t>(issue.unit)];
  }
  active_.push_back(record);
  for (const int called : record->call_units) ++active_calls_[static_cast<std::size_t>(called)];
  if (backward_open_) return;
  backward_open_ = true;
  backward_task_ = ag::get_current_graph_task_id();
  const auto token = std::make_shared<char>();
  backward_alive_ = token;
  ag::Engine::get_default_engine().queue_callback([weak = weak_from_this(), token] {
    if (auto runtime = weak.lock()) runtime->sweep();
  });
}

void Runtime::pre_backward(const Record& record, int call) {
  if (backward_failed()) reset();
  activate(record);
  char& reached = record->reached[static_cast<std::size_t>(call)];
  if (reached) return;
  reached = true;
  const at::NoGradGuard no_grad;
  drop_unheld_images(*record, call);
  advance(*record, record->list.pre_backward[static_cast<std::size_t>(call)]);
  wait_for_unshard(record->call_units[static_cast<std::size_t>(call)]);
}

// See [Note: images that nobody holds].
void Runtime::drop_unheld_images(const ForwardRecord& record, int entered) {
  if (options.free_slots != buffer::FreeSlots::kReturn) return;
  int above = unit(record.call_units[static_cast<std::size_t>(entered)]).parent;
  for (; above >= 0; above = unit(above).parent) {
    for (const auto& group : unit(above).groups) group->reshard_if_unheld();
  }
}

void Runtime::post_backward(const Record& record, int call) {
  if (std::find(active_.begin(), active_.end(), record) == active_.end()) return;
  const at::NoGradGuard no_grad;
  record->left[static_cast<std::size_t>(call)] = true;
  advance(*record, record->list.post_backward[static_cast<std::size_t>(call)]);
}

void Runtime::gradient_ready(int index, int group_index, int param, ParamGroup::GradientEvent event) {
  RuntimeUnit& u = unit(index);
  ParamGroup& group = *u.groups[static_cast<std::size_t>(group_index)];
  RAGGED_CHECK(
      pending_reductions_[static_cast<std::size_t>(index)] > 0,
      "[backward] Expected the gradient of '{}' while its unit '{}' is in backward, but got it {} (rank {}). Use the "
      "unit's parameters only inside its forward, and let outputs that lead to the loss be returned from it.",
      group.plan().params[static_cast<std::size_t>(param)].name, u.name,
      active_.empty() ? "outside a backward of the root" : "after the unit was reduced", groups_.rank);
  group.may_overwrite =
      active_calls_[static_cast<std::size_t>(index)] == 1 && ag::get_current_graph_task_id() == backward_task_;
  if (event == ParamGroup::GradientEvent::kComplete) group.take_gradient(param);
}

void Runtime::advance(ForwardRecord& record, int target, bool skip_gathers) {
  std::vector<int> gathering;
  while (record.cursor < target) {
    const Issue issue = record.list.issues[static_cast<std::size_t>(record.cursor++)];
    switch (issue.kind) {
      case IssueKind::kGather:
        gathering.push_back(issue.unit);
        if (issue.with_next) break;
        if (!skip_gathers) unshard_together(gathering);
        gathering.clear();
        break;
      case IssueKind::kReshard:
        reshard(issue.unit);
        break;
      case IssueKind::kReduce:
        --pending_reductions_[static_cast<std::size_t>(issue.unit)];
        unreduced_[static_cast<std::size_t>(issue.unit)] = true;
        if (unit(issue.unit).groups.front()->requires_gradient_sync) {
          collected_.push_back(issue.unit);
        } else {
          for (const auto& group : unit(issue.unit).groups) group->keep_unreduced();
        }
        if (!issue.with_next) issue_collected_reductions();
        break;
      case IssueKind::kReduceBehind:
        if (unit(issue.unit).groups.front()->requires_gradient_sync) issue_reduction(issue.unit, Part::kBehind);
        break;
    }
  }
}

// At most one scatter and one all-reduce are in flight: their buffers are the ones the plan counts.
void Runtime::issue_reduction(int index, Part part) {
  finish_units(std::exchange(merged_, {}));
  const auto u = static_cast<std::size_t>(index);
  if (part == Part::kAll) unreduced_[u] = false;
  const auto finish = [&](int unit_index) {
    for (const auto& group : unit(unit_index).groups) group->finish_reduction();
  };
  if (scattering_ >= 0) {
    if (all_reducing_ >= 0 && all_reducing_ != scattering_) finish(all_reducing_);
    for (const auto& group : unit(scattering_).groups) group->finish_scatter();
    all_reducing_ = scattering_;
    // Without replicas nothing is left to wait for; finishing now lets the same unit be reduced again.
    if (groups_.replicate.size() == 1 || all_reducing_ == index) finish(all_reducing_);
  }
  for (const auto& group : unit(index).groups) {
    const bool is_due = part == Part::kBehind ? group->is_behind : !(group->is_behind && behind_reduced_[u]);
    if (group->reduces() && is_due) group->issue_reduction();
  }
  behind_reduced_[u] = part == Part::kBehind;
  if (*options.overlap_reductions) {
    scattering_ = index;
  } else {
    finish(index);
  }
  if (std::find(reduced_.begin(), reduced_.end(), index) == reduced_.end()) reduced_.push_back(index);
}

void Runtime::finish_units(const std::vector<int>& units) {
  for (const int index : units) {
    for (const auto& group : unit(index).groups) group->finish_reduction();
  }
}

void Runtime::sweep() {
  const at::NoGradGuard no_grad;
  comm::ProfilerRange range("ragged::sweep", units_[0].name);
  std::sort(active_.begin(), active_.end(), [](const Record& a, const Record& b) { return a->id > b->id; });
  for (const Record& record : active_) {
    advance(*record, static_cast<int>(record->list.issues.size()), groups_.shard.is_stock());
  }
  if (is_last_backward) publish_gradients();
  active_.clear();
  std::fill(active_calls_.begin(), active_calls_.end(), 0);
  backward_open_ = false;
  while (!open_.empty() && open_.back().recomputes) open_.pop_back();  // recomputations that stopped early
}

void Runtime::finish_backward() {
  const at::NoGradGuard no_grad;
  issue_collected_reductions();
  for (int u = static_cast<int>(units_.size()); u-- > 0;) {
    if (unreduced_[static_cast<std::size_t>(u)] && unit(u).groups.front()->requires_gradient_sync) {
      issue_reduction(u, Part::kAll);
    }
  }
  publish_gradients();
  for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
    if (!unit(u).groups.empty() && unit(u).groups.front()->reshard_after_backward) reshard(u);
  }
}

void Runtime::publish_gradients() {
  std::sort(reduced_.begin(), reduced_.end());
  // In the order their all-reduces may still be issued: the one that scatters comes last.
  for (const int index : {all_reducing_, scattering_}) {
    if (index < 0) continue;
    for (const auto& group : unit(index).groups) group->finish_scatter();
  }
  std::vector<ParamGroup*> ready;
  for (const int index : reduced_) {
    for (const auto& group : unit(index).groups) {
      if (!group->reduces()) continue;
      group->finish_reduction();
      if (group->result_is_ready()) ready.push_back(group.get());
    }
  }
  scattering_ = -1;
  all_reducing_ = -1;
  merged_.clear();
  reduced_.clear();
  // Groups on one mesh exchange their flags together; the order of meshes is that of the units, alike on all ranks.
  while (!ready.empty()) {
    const comm::MeshGroups& mesh = ready.front()->spec().groups;
    const auto same = [&](ParamGroup* group) {
      return group->spec().groups.shard.process_group() == mesh.shard.process_group() &&
          group->spec().groups.replicate.process_group() == mesh.replicate.process_group();
    };
    const auto others = std::stable_partition(ready.begin(), ready.end(), same);
    const std::vector<ParamGroup*> together(ready.begin(), others);
    std::vector<char> used;
    for (const ParamGroup* group : together) {
      const std::vector<char> own = group->used();
      used.insert(used.end(), own.begin(), own.end());
    }
    // And one flag a group that was reduced early: gradients came after that.
    std::vector<ParamGroup*> behind;
    for (ParamGroup* group : together) {
      if (!group->is_behind) continue;
      behind.push_back(group);
      used.push_back(static_cast<char>(group->requires_gradient_sync && group->has_unreduced()));
    }
    exchange_used(together, used);
    reduce_latecomers(behind, used.data() + (used.size() - behind.size()));
    const char* flags = used.data();
    for (ParamGroup* group : together) {
      group->publish(flags);
      flags += group->plan().params.size();
    }
    ready.erase(ready.begin(), others);
  }
}

// See [Note: what lies behind the inner units].
void Runtime::reduce_latecomers(const std::vector<ParamGroup*>& groups, const char* is_late) {
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (!is_late[g]) continue;
    RAGGED_CHECK(
        !options.static_use || groups_.mesh.size() == 1,
        "[backward] Expected no more gradients of what unit '{}' holds behind its inner units once backward has "
        "entered these, but got some (rank {}). It is tied to something before them: leave static_use unset, or set "
        "split_bytes=0 in its planning.",
        groups[g]->name(), groups_.rank);
    groups[g]->issue_reduction();
    groups[g]->finish_reduction();
    groups[g]->is_behind = false;
  }
}

// Used-flags of all units travel together, once a backward: a parameter has a gradient if any rank used it.
void Runtime::exchange_used(const std::vector<ParamGroup*>& groups, std::vector<char>& used) const {
  const comm::MeshGroups& mesh = groups.front()->spec().groups;
  if (options.static_use || mesh.shard.is_stock() || (mesh.shard.size() == 1 && mesh.replicate.size() == 1)) return;
  at::Tensor flags = at::from_blob(used.data(), {static_cast<Index>(used.size())}, at::kByte).to(mesh.device);
  mesh.shard.all_reduce_max(flags, "used parameters").wait();
  mesh.replicate.all_reduce_max(flags, "used parameters").wait();
  const at::Tensor host = flags.cpu();
  std::copy_n(reinterpret_cast<const char*>(host.const_data_ptr<std::uint8_t>()), used.size(), used.data());
}

void Runtime::reset() {
  for (RuntimeUnit& unit : units_) {
    for (const auto& group : unit.groups) group->abandon();
  }
  std::fill(pending_reductions_.begin(), pending_reductions_.end(), 0);
  std::fill(unreduced_.begin(), unreduced_.end(), 0);
  std::fill(behind_reduced_.begin(), behind_reduced_.end(), 0);
  active_.clear();
  std::fill(active_calls_.begin(), active_calls_.end(), 0);
  reduced_.clear();
  scattering_ = -1;
  all_reducing_ = -1;
  collected_.clear();
  merged_.clear();
  backward_open_ = false;
  open_.clear();
  record_.reset();
  last_order_.clear();
}

}  // namespace ragged::fsdp
