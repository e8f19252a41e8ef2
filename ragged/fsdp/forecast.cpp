#include "ragged/fsdp/forecast.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace ragged::fsdp {
namespace {

// Walks a step as the runtime would and keeps the books.
class StepWalk {
 public:
  StepWalk(std::span<const UnitForecastInput> units, const StepOptions& options)
      : units_(units),
        options_(options),
        resident_(units.size(), 0),
        reducing_(2 * units.size(), 0),
        filled_(units.size(), 0) {}

  void micro_batch(std::span<const ForwardEvent> events, bool is_last) {
    forward(events);
    std::vector<UnitTraits> traits;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const UnitForecastInput& unit = units_[u];
      traits.push_back(
          {.has_params = !unit.groups.empty(),
           .reduces = unit.reduces(),
           .reshard_after_forward = unit.reshard_after_forward,
           .resident = resident_[u] != 0,
           .reduces_behind = unit.reduces_behind(),
           .gather = unit.gather,
           .reduction = unit.reduction});
    }
    const IssueList list = build_issue_list(events, traits, options_.backward_prefetch, options_.merge_bytes);
    const bool syncs = is_last || options_.sync_each_micro_batch;
    int cursor = 0;
    std::vector<int> gathered;
    std::vector<int> reduced;
    const auto advance = [&](int target) {
      for (; cursor < target; ++cursor) {
        const Issue& issue = list.issues[static_cast<std::size_t>(cursor)];
        if (issue.kind == IssueKind::kGather) {
          gathered.push_back(issue.unit);
          if (!issue.with_next) gather(std::exchange(gathered, {}));
        }
        if (issue.kind == IssueKind::kReshard) drop(issue.unit);
        if (issue.kind == IssueKind::kReduceBehind) reduce_behind(issue.unit, syncs);
        if (issue.kind == IssueKind::kReduce) {
          collect(issue.unit, syncs);
          if (syncs) reduced.push_back(issue.unit);
          if (!issue.with_next) reduce(std::exchange(reduced, {}));
        }
      }
    };
    for (const BackwardStep& step : backward_steps(events)) {
      if (step.begins && options_.drops_unheld) drop_around(step.unit);
      const std::vector<int>& targets = step.begins ? list.pre_backward : list.post_backward;
      advance(targets[static_cast<std::size_t>(step.call)]);
    }
    advance(static_cast<int>(list.issues.size()));
    in_flight_.reset();
    for (int u = 0; syncs && u < static_cast<int>(units_.size()); ++u) {
      release_reduce({u, false});
      release_reduce({u, true});
    }
  }

  StepForecast result;

 private:
  /// Of a unit: what lies behind its inner units, or the rest.
  struct Part {
    int unit = 0;
    bool is_behind = false;
  };

  const UnitForecastInput& at(int unit) const { return units_[static_cast<std::size_t>(unit)]; }

  void forward(std::span<const ForwardEvent> events) {
    // Gathers run ahead by whole units, in the order of the events.
    std::vector<int> order;
    for (const ForwardEvent& event : events) {
      if (event.is_begin) order.push_back(event.unit);
    }
    std::vector<MergeTraits> traits;
    for (const UnitForecastInput& unit : units_) traits.push_back(unit.gather);
    const auto needs_gather = [&](std::size_t position) { return needs(order[position]); };
    std::size_t begun = 0;
    for (const ForwardEvent& event : events) {
      if (!event.is_begin) {
        if (units_[static_cast<std::size_t>(event.unit)].reshard_after_forward) drop(event.unit);
        continue;
      }
      const std::size_t until = std::min(order.size(), begun + static_cast<std::size_t>(options_.forward_prefetch) + 1);
      for (std::size_t i = begun; i < until; ++i) {
        if (!needs_gather(i)) continue;
        std::vector<int> together;
        for (const std::size_t position : merged_gather(order, i, traits, options_.merge_bytes, needs_gather)) {
          together.push_back(order[position]);
        }
        gather(together);
      }
      ++begun;
    }
  }

  bool needs(int unit) const { return !at(unit).groups.empty() && !resident_[static_cast<std::size_t>(unit)]; }

  void gather(const std::vector<int>& together) {
    const bool merges = together.size() > 1;
    for (const int unit : together) {
      if (!needs(unit)) continue;
      resident_[static_cast<std::size_t>(unit)] = true;
      images_ += at(unit).image_bytes();
      for (const GroupForecastInput& group : at(unit).groups) {
        const bool is_alone = group.plan->world_size == 1;
        if (is_alone || merges || !group.gathers_from_masters) {
          result.cast_in_bytes += group.plan->local_numel(options_.rank) * group.param_bytes;
        }
        if (is_alone) continue;
        if (merges) result.copied_bytes += owned_numel(*group.plan) * group.param_bytes;
        result.gathered_bytes += group.plan->image_numel() * group.param_bytes;
        ++result.gathers;
      }
    }
    if (merges) result.gathers -= static_cast<int>(together.size()) - 1;
    result.peak_image_bytes = std::max(result.peak_image_bytes, images_);
  }

  void drop(int unit) {
    char& resident = resident_[static_cast<std::size_t>(unit)];
    if (resident) images_ -= at(unit).image_bytes();
    resident = false;
  }

  void drop_around(int unit) {
    for (int above = at(unit).parent; above >= 0; above = at(above).parent) drop(above);
  }

  // By the time a unit is reduced all its gradients are in its buffer.
  void collect(int unit, bool syncs) {
    char& filled = filled_[static_cast<std::size_t>(unit)];
    for (const GroupForecastInput& group : at(unit).groups) {
      for (const plan::ParamSpec& param : group.plan->params) {
        if (!param.trainable) continue;
        (filled ? result.added_grad_bytes : result.cast_grad_bytes) += param.numel() * reduce_bytes(group);
      }
    }
    filled = !syncs;
    // The root collects throughout; what it has behind its inner units, until backward enters them, and the rest then
    // when they are done.
    if (!at(0).reduces_behind()) take_reduce({0, false});
    take_reduce({unit, false});
    if (!syncs || !at(unit).reduces_behind()) take_reduce({unit, true});
  }

  void reduce(const std::vector<int>& together) {
    if (together.size() == 1) issue({together.front(), false});
    if (together.size() < 2) return;
    finish_last();
    for (const int unit : together) {
      release_reduce({unit, false});  // what merges is out of its buffer at once
      count_reduction({unit, false}, /*merges=*/true);
    }
    result.reduces -= static_cast<int>(together.size()) - 1;
  }

  void reduce_behind(int unit, bool syncs) {
    take_reduce({unit, true});
    if (syncs) issue({unit, true});
  }

  // The reduction issued before is complete.
  void finish_last() {
    if (in_flight_) release_reduce(*in_flight_);
    in_flight_.reset();
  }

  void issue(Part part) {
    finish_last();
    if (options_.overlap_reductions) {
      in_flight_ = part;
    } else {
      release_reduce(part);
    }
    count_reduction(part, /*merges=*/false);
  }

  void count_reduction(Part part, bool merges) {
    for (const GroupForecastInput& group : at(part.unit).groups) {
      const int trainable = group.plan->num_trainable_segments();
      if (group.is_behind != part.is_behind || group.plan->world_size == 1 || trainable == 0) continue;
      if (merges) result.copied_bytes += owned_numel(*group.plan, trainable) * reduce_bytes(group);
      result.reduced_bytes += group.plan->image_numel(trainable) * reduce_bytes(group);
      ++result.reduces;
    }
  }

  // By all ranks together: the image without the padding between owners.
  static Index owned_numel(const plan::BucketPlan& plan, int num_segments = -1) {
    if (num_segments < 0) num_segments = static_cast<int>(plan.segments.size());
    Index numel = 0;
    for (int rank = 0; rank < plan.world_size; ++rank) numel += plan.local_numel(rank, num_segments);
    return numel;
  }

  Index reduce_bytes(const GroupForecastInput& group) const {
    const bool accumulates = options_.micro_batches > 1 && !options_.sync_each_micro_batch;
    return group.narrows && !accumulates ? group.param_bytes : group.reduce_bytes;
  }

  Index reduce_buffer_bytes(Part part) const {
    Index bytes = 0;
    for (const GroupForecastInput& group : at(part.unit).groups) {
      if (group.is_behind != part.is_behind) continue;
      bytes += group.plan->image_numel(group.plan->num_trainable_segments()) * reduce_bytes(group);
    }
    return bytes;
  }

  char& taken(Part part) { return reducing_[2 * static_cast<std::size_t>(part.unit) + (part.is_behind ? 1 : 0)]; }

  void take_reduce(Part part) {
    if (at(part.unit).groups.empty() || taken(part)) return;
    taken(part) = true;
    reduce_ += reduce_buffer_bytes(part);
    result.peak_reduce_bytes = std::max(result.peak_reduce_bytes, reduce_);
  }

  void release_reduce(Part part) {
    if (taken(part)) reduce_ -= reduce_buffer_bytes(part);
    taken(part) = false;
  }

  std::span<const UnitForecastInput> units_;
  const StepOptions& options_;
  std::vector<char> resident_;
  std::vector<char> reducing_;  // by unit and part: its reduce buffer is taken
  std::vector<char> filled_;    // by unit: with gradients of an earlier micro-batch
  Index images_ = 0;
  Index reduce_ = 0;
  std::optional<Part> in_flight_;
};

Index image_bound(std::span<const UnitForecastInput> units, const StepOptions& options) {
  std::vector<int> parents;
  for (const UnitForecastInput& unit : units) parents.push_back(unit.parent);
  const std::vector<char> is_ancestor = ancestors(parents);
  Index largest = 0;
  Index ancestors = 0;
  Index kept = 0;   // units that stay gathered until backward are open throughout
  Index small = 0;  // units that may be gathered with others
  std::vector<Index> open(units.size(), 0);
  for (std::size_t u = 0; u < units.size(); ++u) {
    const UnitForecastInput& unit = units[u];
    if (unit.parent >= 0) open[u] = open[static_cast<std::size_t>(unit.parent)];
    if (is_ancestor[u] || unit.parent < 0) {
      open[u] += unit.image_bytes();
      ancestors = std::max(ancestors, open[u]);
    }
    if (unit.parent < 0) continue;
    if (unit.gather.kind >= 0 && unit.gather.bytes <= options.merge_bytes) small += unit.image_bytes();
    if (unit.reshard_after_forward) {
      largest = std::max(largest, unit.image_bytes());
    } else {
      kept += unit.image_bytes();
    }
  }
  const int ahead = std::max(options.backward_prefetch, options.forward_prefetch);
  const auto others = static_cast<Index>(std::count_if(units.begin(), units.end(), [](const auto& unit) {
    return unit.parent >= 0 && !unit.groups.empty() && unit.reshard_after_forward;
  }));
  return ancestors + kept + std::min<Index>(ahead + 1, others) * largest + std::min(options.merge_bytes, small);
}

}  // namespace

Index UnitForecastInput::image_bytes() const {
  Index bytes = 0;
  for (const GroupForecastInput& group : groups) bytes += group.plan->image_numel() * group.param_bytes;
  return bytes;
}

bool UnitForecastInput::reduces() const {
  return std::any_of(groups.begin(), groups.end(), [](const auto& g) { return g.plan->num_trainable_segments() > 0; });
}

bool UnitForecastInput::reduces_behind() const {
  return std::any_of(groups.begin(), groups.end(), [](const auto& group) {
    return group.is_behind && group.plan->num_trainable_segments() > 0;
  });
}

std::vector<char> ancestors(std::span<const int> parents) {
  std::vector<char> has_units_inside(parents.size(), 0);
  for (const int parent : parents) {
    if (parent >= 0) has_units_inside[static_cast<std::size_t>(parent)] = true;
  }
  return has_units_inside;
}

StepForecast forecast_step(
    std::span<const UnitForecastInput> units, std::span<const ForwardEvent> events, const StepOptions& options) {
  StepWalk walk(units, options);
  for (int i = 0; i < options.micro_batches; ++i) walk.micro_batch(events, i + 1 == options.micro_batches);
  StepForecast forecast = walk.result;
  for (const UnitForecastInput& unit : units) {
    for (const GroupForecastInput& group : unit.groups)
      forecast.padding_bytes += group.plan->padding() * group.param_bytes;
  }
  forecast.image_bytes_bound = image_bound(units, options);
  return forecast;
}

std::vector<ForwardEvent> module_order_events(std::span<const int> parent) {
  std::vector<ForwardEvent> events;
  std::vector<int> open;
  for (int unit = 0; unit < static_cast<int>(parent.size()); ++unit) {
    while (!open.empty() && open.back() != parent[static_cast<std::size_t>(unit)]) {
      events.push_back({false, open.back(), true});
      open.pop_back();
    }
    events.push_back({true, unit, true});
    open.push_back(unit);
  }
  for (; !open.empty(); open.pop_back()) events.push_back({false, open.back(), true});
  return events;
}

}  // namespace ragged::fsdp
