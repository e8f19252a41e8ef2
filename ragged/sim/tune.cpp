#include "ragged/sim/tune.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include <fmt/format.h>

#include "ragged/sim/text.h"

namespace ragged::sim {
namespace {

constexpr double kUsable = 0.9;        // of a device's memory: the rest is fragments and what isn't modelled
constexpr double kAsFast = 1.01;       // so near in time that memory decides
constexpr double kLessMemory = 0.995;  // what the next point of the front must save to be worth a line
constexpr int kMostPrefetch = 2;

std::vector<int> divisors(int ranks) {
  std::vector<int> found;
  for (int d = 1; d <= ranks; ++d) {
    if (ranks % d == 0) found.push_back(d);
  }
  return found;
}

// The wanted count, and two halvings of it for what they would bring.
std::vector<Index> row_counts(Index wanted) {
  std::vector<Index> rows{wanted};
  while (rows.size() < 3 && rows.back() % 2 == 0) rows.push_back(rows.back() / 2);
  return rows;
}

class Tuner {
 public:
  Tuner(const Model& model, const TuneRequest& request) : model_(model), request_(request) {
    result_.memory = request.memory > 0 ? request.memory : kUsable * request.step.device.memory;
  }

  TuneResult run() {
    for (const int shard : divisors(request_.ranks)) try_group(shard);
    choose();
    front();
    explain();
    neighbours();
    return std::move(result_);
  }

 private:
  using PlanKey = std::tuple<int, Index, int>;  // shard, rows, layers a bucket

  const ModelPlan& planned(int shard, Index rows, int layers) {
    const auto [found, is_new] = plans_.try_emplace(PlanKey{shard, rows, layers});
    if (is_new) found->second = plan_model(model_, layout(shard, rows, layers));
    return found->second;
  }

  LayoutRequest layout(int shard, Index rows, int layers) const {
    return {
        .ranks = shard,
        .policy = {.rows = rows, .flat = request_.policy.flat},
        .layers_per_bucket = layers,
        .ragged_blocks = request_.ragged_blocks,
        .with_bounds = false,
        .with_soap = request_.step.optimizer == Optimizer::kSoap};
  }

  // What must be held whatever the layout: without it nothing needs planning.
  double least_held(int shard) const {
    const Optimizer fixed = request_.step.optimizer;
    const double states =
        request_.fixed_optimizer ? std::min(state_bytes(fixed, true), state_bytes(fixed, false)) : 2.0;
    return static_cast<double>(model_.inventory.numel()) / shard * (8 + states);
  }

  std::vector<Optimizer> optimizers() const {
    std::vector<Optimizer> found{request_.step.optimizer};
    if (request_.fixed_optimizer) return found;
    for (const Optimizer other : {Optimizer::kAdamW, Optimizer::kAdamWBf16, Optimizer::kAdamW8bit}) {
      const bool saves = state_bytes(other, true) < state_bytes(found.front(), true);
      if (saves) found.push_back(other);
    }
    return found;
  }

  void try_group(int shard) {
    // The full group is tried in any case: if nothing fits, its figures are what to show.
    if (least_held(shard) > result_.memory && shard != request_.ranks) return;
    GroupRow row{.shard = shard};
    for (const Index rows : row_counts(request_.policy.rows)) {
      for (int i = 0; i < 3; ++i) {
        const ModelPlan& plan = planned(shard, rows, kTunedLayers[i]);
        if (rows == request_.policy.rows) row.padding[i] = plan.padding_fraction();
        try_plan(plan, rows, kTunedLayers[i]);
      }
    }
    const ModelPlan& plan = planned(shard, request_.policy.rows, 1);
    row.held = 8.0 * static_cast<double>(plan.largest_load()) + optimizer_bytes(plan, request_.step.optimizer);
    result_.groups.push_back(row);
  }

  void try_plan(const ModelPlan& plan, Index rows, int layers) {
    StepRequest step = request_.step;
    step.replicas = request_.ranks / plan.request.ranks;
    for (const Optimizer optimizer : optimizers()) {
      for (const bool reshards : {true, false}) {
        for (int prefetch = 0; prefetch <= kMostPrefetch; ++prefetch) {
          step.optimizer = optimizer;
          step.reshard_after_forward = reshards;
          step.prefetch = prefetch;
          const StepResult found = simulate_step(plan, step);
          points_.push_back(
              {.shard = plan.request.ranks,
               .replicas = step.replicas,
               .rows = rows,
               .layers_per_bucket = layers,
               .reshard_after_forward = reshards,
               .prefetch = prefetch,
               .optimizer = optimizer,
               .padding = plan.padding_fraction(),
               .memory = found.peak,
               .seconds = found.seconds});
        }
      }
    }
    result_.tried = static_cast<int>(points_.size());
  }

  // The fastest that fits and changes nothing that training would notice; then with smaller states; then with smaller
  // blocks; then whatever takes least.
  void choose() {
    const auto fastest = [&](auto&& allowed) -> const TunePoint* {
      const TunePoint* best = nullptr;
      for (const TunePoint& point : points_) {
        if (point.memory > result_.memory || !allowed(point)) continue;
        if (best == nullptr || point.seconds < best->seconds) best = &point;
      }
      if (best == nullptr) return nullptr;
      const TunePoint* frugal = best;
      for (const TunePoint& point : points_) {
        if (point.memory > result_.memory || !allowed(point) || point.seconds > kAsFast * best->seconds) continue;
        if (point.memory < frugal->memory) frugal = &point;
      }
      return frugal;
    };
    const auto as_wanted = [&](const TunePoint& point) { return point.rows == request_.policy.rows; };
    for (const Optimizer optimizer : optimizers()) {
      const TunePoint* found = fastest([&](const TunePoint& p) { return as_wanted(p) && p.optimizer == optimizer; });
      if (found == nullptr) continue;
      result_.best = *found;
      result_.fits = true;
      return;
    }
    if (const TunePoint* found = fastest([](const TunePoint&) { return true; })) {
      result_.best = *found;
      result_.fits = true;
      return;
    }
    result_.best = *std::ranges::min_element(points_, {}, &TunePoint::memory);
  }

  void front() {
    std::vector<TunePoint> sorted = points_;
    std::ranges::stable_sort(sorted, [](const TunePoint& a, const TunePoint& b) {
      return a.seconds != b.seconds ? a.seconds < b.seconds : a.memory < b.memory;
    });
    for (const TunePoint& point : sorted) {
      if (result_.fits && point.memory > result_.memory) continue;
      if (result_.front.empty() || point.memory < kLessMemory * result_.front.back().memory) {
        result_.front.push_back(point);
      }
    }
  }

  void explain() {
    const TunePoint& best = result_.best;
    std::vector<std::string>& reasons = result_.reasons;
    if (!result_.fits) {
      reasons.push_back(fmt::format(
          "nothing fits: the least is {} where {} may be taken; take more ranks, fewer --tokens, or a smaller model",
          bytes_text(best.memory), bytes_text(result_.memory)));
      StepRequest step = request_.step;
      step.replicas = best.replicas;
      step.optimizer = best.optimizer;
      step.reshard_after_forward = best.reshard_after_forward;
      step.prefetch = best.prefetch;
      const ModelPlan& plan = planned(best.shard, best.rows, best.layers_per_bucket);
      for (std::string& line : advice(plan, step, simulate_step(plan, step))) reasons.push_back(std::move(line));
      return;
    }
    const ModelPlan& whole = planned(request_.ranks, request_.policy.rows, 1);
    if (best.shard < request_.ranks || best.layers_per_bucket > 1) {
      std::string text = blocks_text(whole) + "; ";
      if (best.shard < request_.ranks) {
        text += fmt::format("shard over {} and replicate {}x", grouped(best.shard), best.replicas);
        if (best.layers_per_bucket > 1) text += " with ";
      }
      if (best.layers_per_bucket > 1) text += fmt::format("{} layers a bucket", best.layers_per_bucket);
      reasons.push_back(fmt::format(
          "{}: padding {} instead of {}", text, percent_text(best.padding), percent_text(whole.padding_fraction())));
    } else {
      reasons.push_back(fmt::format(
          "one group of all {} ranks holds least and pads {}", grouped(best.shard), percent_text(best.padding)));
    }
    StepRequest plain = request_.step;
    plain.replicas = 1;
    const StepResult before = simulate_step(whole, plain);
    if (before.seconds > 1.005 * best.seconds) {
      reasons.push_back(fmt::format(
          "a step takes {}, against {} when sharded over all {} with {} ahead", seconds_text(best.seconds),
          seconds_text(before.seconds), grouped(request_.ranks), plain.prefetch));
    }
    if (!best.reshard_after_forward) reasons.push_back("memory allows to keep layers gathered, which saves a gather");
    if (best.optimizer != request_.step.optimizer) {
      reasons.push_back(fmt::format("{} doesn't fit, {} does", name(request_.step.optimizer), name(best.optimizer)));
    }
    if (best.rows != request_.policy.rows) {
      reasons.push_back(fmt::format("{} rows a block don't fit, {} do", request_.policy.rows, best.rows));
    }
    smaller_blocks();
  }

  // "128 rows x 1,024 ranks leaves 6 blocks where 5.6 are needed", for the kind with most parameters.
  static std::string blocks_text(const ModelPlan& plan) {
    const UnitKind* largest = &plan.kinds.front();
    for (const UnitKind& kind : plan.kinds) {
      if (kind.count * kind.numel > largest->count * largest->numel) largest = &kind;
    }
    Index block = 1;
    Index numel = 0;
    for (const plan::ParamSpec& param : largest->plan.params) {
      if (param.numel() > numel) block = param.block;
      numel = std::max(numel, param.numel());
    }
    Index taken = 0;
    for (const plan::Segment& segment : largest->plan.segments) taken += segment.shard_size;
    const double needed = static_cast<double>(largest->numel) / plan.request.ranks / static_cast<double>(block);
    const double got = static_cast<double>(taken) / static_cast<double>(block);
    return fmt::format(
        "{} row{} x {} ranks leaves {:.4g} blocks a rank where {:.4g} are needed", plan.request.policy.rows,
        plan.request.policy.rows == 1 ? "" : "s", grouped(plan.request.ranks), got, needed);
  }

  void smaller_blocks() {
    const TunePoint& best = result_.best;
    for (const Index rows : row_counts(request_.policy.rows)) {
      if (rows >= best.rows) continue;
      const double padding = planned(best.shard, rows, best.layers_per_bucket).padding_fraction();
      if (best.padding - padding < 0.005) continue;
      result_.reasons.push_back(
          fmt::format("with {} rows a block the same group would pad {}", rows, percent_text(padding)));
      return;
    }
  }

  // Numbers of ranks nearby: padding isn't monotone in them.
  void neighbours() {
    const int ranks = request_.ranks;
    const int step = static_cast<int>(std::min<Index>(8, std::max<Index>(1, request_.step.device.ranks_per_node)));
    const double here = planned(ranks, request_.policy.rows, 1).padding_fraction();
    std::set<int> tried{ranks};
    for (const double part : {0.75, 0.8125, 0.875, 0.9375, 1.0625, 1.125, 1.25}) {
      const int other = static_cast<int>(std::lround(part * ranks / step)) * step;
      if (other < 1 || !tried.insert(other).second) continue;
      const double there = plan_model(model_, layout(other, request_.policy.rows, 1)).padding_fraction();
      const bool better = here - there > 0.01 && there < here / 2;
      const bool worse = there - here > 0.01 && there > 2 * here;
      if (!better && !worse) continue;
      result_.neighbours.push_back(fmt::format(
          "{} ranks in one group would pad {}, far {} than {} with its {}", grouped(other), percent_text(there),
          better ? "less" : "more", grouped(ranks), percent_text(here)));
    }
  }

  const Model& model_;
  const TuneRequest& request_;
  std::map<PlanKey, ModelPlan> plans_;
  std::vector<TunePoint> points_;
  TuneResult result_;
};

}  // namespace

TuneResult tune(const Model& model, const TuneRequest& request) {
  RAGGED_CHECK(request.ranks >= 1, "[tune] Expected at least 1 rank, but got {} (--ranks).", request.ranks);
  constexpr int kMostRanks = 1 << 16;
  RAGGED_CHECK(
      request.ranks <= kMostRanks, "[tune] Expected at most {} ranks, but got {} (--ranks).", kMostRanks,
      request.ranks);
  return Tuner(model, request).run();
}

}  // namespace ragged::sim
