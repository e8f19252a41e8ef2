#include "ragged/sim/step.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "ragged/sim/text.h"

namespace ragged::sim {
namespace {

using plan::InventoryTensor;
using plan::Segment;
using plan::SegmentKind;

constexpr Index kLongestSequence = 8192;

std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}

bool has_role(const UnitKind& kind, std::string_view role) {
  return std::ranges::any_of(kind.tensors, [&](const InventoryTensor& tensor) { return tensor.role == role; });
}

// A kind of unit as the walk needs it.
struct UnitCost {
  double forward_seconds = 0;
  double backward_seconds = 0;
  double gather_seconds = 0;
  double reduce_seconds = 0;
  double all_reduce_seconds = 0;
  double image = 0;      // bytes
  double reduce = 0;     // bytes of the reduce buffer
  double gradients = 0;  // bytes of the fullest rank's shard
  double in_flight = 0;  // bytes of the largest gradient on its way into the buffer
  double kept = 0;       // bytes of activations from forward to backward
  double working = 0;    // bytes of activations only while backward runs
  double flops = 0;      // of the model, both ways
};

class CostModel {
 public:
  CostModel(const ModelPlan& plan, const StepRequest& request) : plan_(plan), request_(request) {
    sequence_ = request.sequence > 0 ? request.sequence : std::min(request.tokens, kLongestSequence);
    for (const UnitKind& kind : plan.kinds) {
      for (const InventoryTensor& tensor : kind.tensors) {
        if (tensor.role == "embed" && tensor.shape.size() == 2) hidden_ = static_cast<double>(tensor.shape[1]);
        if (tensor.role == "norm" && hidden_ == 0) hidden_ = static_cast<double>(tensor.shape.back());
      }
    }
  }

  UnitCost cost(const UnitKind& kind) const {
    UnitCost cost;
    const auto tokens = static_cast<double>(request_.tokens);
    const double forward = forward_flops(kind);
    const bool recomputes = request_.checkpointing == Checkpointing::kFull && kind.is_layer;
    cost.flops = 3 * forward;
    cost.image = static_cast<double>(kind.plan.image_numel()) * request_.param_bytes;
    const double rate = request_.device.flops * request_.device.flops_efficiency;
    const double read = cost.image * active_share(kind) / request_.device.memory_bandwidth;
    cost.forward_seconds = std::max(forward / rate, read);
    cost.backward_seconds = std::max((recomputes ? 3 : 2) * forward / rate, 2 * read);
    const Index trainable = kind.plan.image_numel(kind.plan.num_trainable_segments());
    const double addend = request_.device.sums_after_transfer ? std::min(request_.param_bytes, request_.reduce_bytes)
                                                              : request_.reduce_bytes;
    cost.reduce = static_cast<double>(trainable) * addend;
    const double shard = static_cast<double>(kind.plan.local_numel(fullest_rank()));
    cost.gradients = shard * 4;
    for (const Segment& segment : kind.plan.segments) {
      if (segment.numel == 0) continue;
      Index roots = 1;
      if (segment.kind != SegmentKind::kUniform) {
        roots = std::ranges::count_if(segment.owners, [](const layout::Interval& own) { return !own.empty(); });
      }
      const auto elements = static_cast<double>(segment.numel);
      cost.gather_seconds +=
          gather_seconds(request_.device, elements * request_.param_bytes, plan_.request.ranks, roots);
      cost.reduce_seconds += gather_seconds(request_.device, elements * addend, plan_.request.ranks, roots);
    }
    cost.all_reduce_seconds =
        all_reduce_seconds(request_.device, shard * request_.reduce_bytes, request_.replicas, plan_.request.ranks);
    for (const InventoryTensor& tensor : kind.tensors) {
      cost.in_flight = std::max(cost.in_flight, static_cast<double>(tensor.numel()) * request_.param_bytes);
    }
    const double activations = tokens * activation_bytes(kind);
    if (recomputes) {
      cost.kept = tokens * 2 * hidden_ * kind.layers;
      cost.working = activations / kind.layers;
    } else {
      cost.kept = activations;
    }
    return cost;
  }

 private:
  int fullest_rank() const { return static_cast<int>(std::ranges::max_element(plan_.load) - plan_.load.begin()); }

  // The share of a tensor that a token meets.
  double share(const InventoryTensor& tensor) const {
    const bool is_routed = tensor.role == "expert" || tensor.role == "expert_bias";
    if (!is_routed || plan_.facts.experts == 0 || plan_.facts.experts_per_token == 0) return 1;
    return static_cast<double>(plan_.facts.experts_per_token) / static_cast<double>(plan_.facts.experts);
  }

  // Of the weights that a rank reads: with many tokens every expert is met.
  double active_share(const UnitKind& kind) const {
    if (kind.numel == 0) return 0;
    double read = 0;
    for (const InventoryTensor& tensor : kind.tensors) {
      if (tensor.kind == "embedding") continue;
      read += static_cast<double>(tensor.numel()) * std::min(1.0, share(tensor) * static_cast<double>(request_.tokens));
    }
    return read / static_cast<double>(kind.numel);
  }

  double forward_flops(const UnitKind& kind) const {
    const auto tokens = static_cast<double>(request_.tokens);
    double flops = 0;
    for (const InventoryTensor& tensor : kind.tensors) {
      if (tensor.shape.size() < 2 || tensor.role == "expert_bias") continue;
      // A table is looked up. A tied one is the head as well, and is multiplied with.
      const bool is_table = tensor.kind == "embedding" && !(has_role(kind, "norm") && tensor.role == "embed");
      if (!is_table) flops += 2 * tokens * static_cast<double>(tensor.numel()) * share(tensor);
    }
    if (kind.is_layer) {
      // Scores and their product with the values, half of them masked.
      flops += 2 * tokens * static_cast<double>(sequence_ * plan_.facts.attention_width) * kind.layers;
    }
    return flops;
  }

  // Of one token.
  double activation_bytes(const UnitKind& kind) const {
    if (!kind.is_layer && !has_role(kind, "head") && !has_role(kind, "norm")) return 2 * hidden_;  // the table's output
    double elements = 2 * hidden_ * (kind.is_layer ? kind.layers : 0.5);
    double logits = 0;
    std::set<std::pair<std::string, Index>> inputs;
    for (const InventoryTensor& tensor : kind.tensors) {
      const std::size_t dims = tensor.shape.size();
      if (dims < 2 || tensor.role == "expert_bias" || tensor.role == "router") continue;
      const Index rows = tensor.shape[dims - 2];
      const Index columns = tensor.shape[dims - 1];
      if (!kind.is_layer && (tensor.role == "head" || tensor.role == "embed")) {
        logits = static_cast<double>(rows) * 6;
        continue;
      }
      const double copies = tensor.role == "expert" ? expert_copies(tensor) : 1;
      elements += copies * static_cast<double>(rows);
      // A fused tensor stands for all experts; per-expert ones come one by one, each with its share.
      if (tensor.role == "expert" && dims == 2) {
        elements += copies * static_cast<double>(columns);
      } else if (inputs.emplace(tensor.role, columns).second) {
        elements += copies * static_cast<double>(columns) * (kind.is_layer ? kind.layers : 1);
      }
    }
    return 2 * elements + logits;
  }

  double expert_copies(const InventoryTensor& tensor) const {
    const auto used = static_cast<double>(std::max<Index>(1, plan_.facts.experts_per_token));
    if (tensor.shape.size() > 2 || plan_.facts.experts == 0) return used;
    return used / static_cast<double>(plan_.facts.experts);
  }

  const ModelPlan& plan_;
  const StepRequest& request_;
  Index sequence_ = 0;
  double hidden_ = 0;
};

class Walk {
 public:
  Walk(const ModelPlan& plan, const StepRequest& request) : plan_(plan), request_(request) {
    const CostModel model(plan, request);
    for (const UnitKind& kind : plan.kinds) costs_.push_back(model.cost(kind));
    order();
  }

  StepResult run() {
    now_[at(static_cast<int>(Use::kParameters))] = 4 * static_cast<double>(plan_.largest_load());
    now_[at(static_cast<int>(Use::kOptimizer))] = optimizer_bytes(plan_, request_.optimizer);
    if (root_ >= 0) gather(root_, 0);
    forward();
    backward();
    reduce_root();
    optimizer_step();
    finish();
    return std::move(result_);
  }

 private:
  struct Change {
    double time = 0;
    Use use = Use::kImages;
    double bytes = 0;
  };

  const UnitCost& cost(int unit) const { return costs_[at(plan_.unit_kinds[at(unit)])]; }
  const std::string& unit_name(int unit) const { return plan_.unit_names[at(unit)]; }

  // Embedding, layers, norm and head; what holds embedding and head is open throughout.
  void order() {
    std::vector<int> last;
    std::vector<int> layers;
    for (int unit = 0; at(unit) < plan_.unit_kinds.size(); ++unit) {
      const UnitKind& kind = plan_.kinds[at(plan_.unit_kinds[at(unit)])];
      if (kind.is_layer) {
        layers.push_back(unit);
      } else if (has_role(kind, "embed") && (has_role(kind, "head") || has_role(kind, "norm")) && root_ < 0) {
        root_ = unit;
      } else {
        (has_role(kind, "embed") ? order_ : last).push_back(unit);
      }
    }
    order_.insert(order_.end(), layers.begin(), layers.end());
    order_.insert(order_.end(), last.begin(), last.end());
  }

  void change(double time, Use use, double bytes) {
    if (bytes != 0) changes_.push_back({time, use, bytes});
  }

  double compute(std::string name, double ready, double seconds) {
    const double begin = std::max(compute_free_, ready);
    compute_free_ = begin + seconds;
    result_.spans.push_back({std::move(name), Lane::kCompute, begin, compute_free_});
    return begin;
  }

  double network(std::string name, double ready, double seconds) {
    const double begin = std::max(network_free_, ready);
    if (seconds <= 0) return begin;
    network_free_ = begin + seconds;
    result_.spans.push_back({std::move(name), Lane::kNetwork, begin, network_free_});
    return begin;
  }

  // Returns when the image is whole.
  double gather(int unit, double ready) {
    const UnitCost& c = cost(unit);
    const double begin = network("all-gather " + unit_name(unit), ready, c.gather_seconds);
    change(ready, Use::kImages, c.image);  // its slot is taken when it is issued
    if (plan_.request.ranks > 1) result_.gathered_bytes += c.image;
    return c.gather_seconds > 0 ? network_free_ : begin;
  }

  void forward() {
    std::vector<double> done;
    double root_ready = network_free_;
    for (std::size_t i = 0; i < order_.size(); ++i) {
      const int unit = order_[i];
      const double whole = gather(unit, slot_free(done, i, 0));
      const double begin =
          compute("forward " + unit_name(unit), std::max(whole, root_ready), cost(unit).forward_seconds);
      root_ready = 0;
      change(begin, Use::kActivations, cost(unit).kept);
      done.push_back(compute_free_);
      if (request_.reshard_after_forward) change(compute_free_, Use::kImages, -cost(unit).image);
    }
    if (root_ >= 0) {
      const double begin = compute("forward " + unit_name(root_), root_ready, cost(root_).forward_seconds);
      change(begin, Use::kActivations, cost(root_).kept);
    }
  }

  // When the slot of the i-th gather of a direction is free.
  double slot_free(const std::vector<double>& done, std::size_t i, double start) const {
    const std::size_t slots = at(request_.prefetch) + 1;
    return i < slots ? start : done[i - slots];
  }

  void backward() {
    const double start = compute_free_;
    const std::vector<int> units(order_.rbegin(), order_.rend());
    std::vector<double> whole(units.size(), start);
    std::vector<double> done;
    std::vector<double> reduced;
    std::size_t gathered = 0;
    if (root_ >= 0) {
      change(compute_free_, Use::kReduce, cost(root_).reduce);
      compute("backward " + unit_name(root_), 0, cost(root_).backward_seconds);
      change(compute_free_, Use::kActivations, -cost(root_).kept);
    }
    for (std::size_t i = 0; i < units.size(); ++i) {
      for (; request_.reshard_after_forward && gathered < std::min(units.size(), i + at(request_.prefetch) + 1);
           ++gathered) {
        whole[gathered] = gather(units[gathered], slot_free(done, gathered, start));
      }
      const int unit = units[i];
      const UnitCost& c = cost(unit);
      const double buffer_free = i < 2 ? 0 : reduced[i - 2];
      const double begin = compute("backward " + unit_name(unit), std::max(whole[i], buffer_free), c.backward_seconds);
      change(begin, Use::kReduce, c.reduce);
      change(begin, Use::kGradients, c.in_flight);
      change(begin, Use::kActivations, c.working);
      change(compute_free_, Use::kActivations, -c.working - c.kept);
      change(compute_free_, Use::kGradients, -c.in_flight);
      change(compute_free_, Use::kImages, -c.image);
      done.push_back(compute_free_);
      reduced.push_back(reduce(unit, compute_free_));
    }
  }

  // Returns when the reduce buffer is free.
  double reduce(int unit, double ready) {
    const UnitCost& c = cost(unit);
    const double begin = network("reduce-scatter " + unit_name(unit), ready, c.reduce_seconds);
    const double free = c.reduce_seconds > 0 ? network_free_ : begin;
    change(begin, Use::kGradients, c.gradients);
    change(free, Use::kReduce, -c.reduce);
    if (plan_.request.ranks > 1) result_.reduced_bytes += c.reduce;
    network("all-reduce " + unit_name(unit), free, c.all_reduce_seconds);
    end_ = std::max({end_, free, network_free_});
    return free;
  }

  void reduce_root() {
    if (root_ < 0) return;
    change(compute_free_, Use::kImages, -cost(root_).image);
    reduce(root_, compute_free_);
  }

  void optimizer_step() {
    // Read and write masters and states, read gradients.
    const double states = optimizer_bytes(plan_, request_.optimizer);
    const double traffic = static_cast<double>(plan_.largest_load()) * 12 + 2 * states;
    compute("optimizer", end_, traffic / request_.device.memory_bandwidth);
    double gradients = 0;
    for (const Change& one : changes_) gradients += one.use == Use::kGradients ? one.bytes : 0;
    change(compute_free_, Use::kGradients, -gradients);
  }

  void finish() {
    result_.seconds = compute_free_;
    double busy = 0;
    for (const StepSpan& span : result_.spans) {
      (span.lane == Lane::kCompute ? busy : result_.network_seconds) += span.end - span.begin;
    }
    result_.compute_seconds = busy;
    result_.exposed_seconds = result_.seconds - busy;
    for (const int kind : plan_.unit_kinds) result_.flops += costs_[at(kind)].flops;
    result_.mfu = result_.flops / (result_.seconds * request_.device.flops);
    // What ends at an instant makes room for what begins at it.
    std::ranges::stable_sort(changes_, [](const Change& a, const Change& b) {
      return a.time != b.time ? a.time < b.time : (a.bytes < 0) > (b.bytes < 0);
    });
    result_.memory.push_back({0, now_});
    note_peak(0);
    for (const Change& one : changes_) {
      double& bytes = now_[at(static_cast<int>(one.use))];
      bytes += one.bytes;
      if (one.bytes < 0 && bytes < 0.5) bytes = 0;  // what rounding leaves
      if (result_.memory.back().time == one.time) {
        result_.memory.back().bytes = now_;
      } else {
        result_.memory.push_back({one.time, now_});
      }
      note_peak(one.time);
    }
    for (const StepSpan& span : result_.spans) {
      const bool covers =
          span.lane == Lane::kCompute && span.begin <= result_.peak_time && result_.peak_time < span.end;
      if (covers || result_.peak_during.empty()) result_.peak_during = span.name;
    }
  }

  void note_peak(double time) {
    result_.peak_images = std::max(result_.peak_images, now_[at(static_cast<int>(Use::kImages))]);
    result_.peak_reduce = std::max(result_.peak_reduce, now_[at(static_cast<int>(Use::kReduce))]);
    if (sum(now_) <= result_.peak) return;
    result_.peak = sum(now_);
    result_.peak_time = time;
    result_.at_peak = now_;
  }

  const ModelPlan& plan_;
  const StepRequest& request_;
  std::vector<UnitCost> costs_;
  std::vector<int> order_;
  int root_ = -1;
  StepResult result_;
  std::vector<Change> changes_;
  Bytes now_{};
  double compute_free_ = 0;
  double network_free_ = 0;
  double end_ = 0;
};

}  // namespace

std::string_view title(Use use) {
  constexpr std::string_view kTitles[] = {"parameters",  "optimizer states", "gradients",
                                          "activations", "gathered images",  "reduce buffers"};
  return kTitles[at(static_cast<int>(use))];
}

std::string_view key(Use use) {
  constexpr std::string_view kKeys[] = {"parameters", "optimizer", "gradients", "activations", "images", "reduce"};
  return kKeys[at(static_cast<int>(use))];
}

double sum(const Bytes& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), 0.0);
}

StepResult simulate_step(const ModelPlan& plan, const StepRequest& request) {
  RAGGED_CHECK(
      request.tokens >= 1, "[simulate] Expected at least 1 token a rank, but got {} (--tokens).", request.tokens);
  RAGGED_CHECK(
      request.tokens <= Index{1} << 32, "[simulate] Expected at most 2^32 tokens a rank, but got {} (--tokens).",
      request.tokens);
  RAGGED_CHECK(
      request.sequence >= 0, "[simulate] Expected a sequence of at least 1 token, but got {} (--sequence).",
      request.sequence);
  RAGGED_CHECK(request.replicas >= 1, "[simulate] Expected at least 1 replica, but got {}.", request.replicas);
  RAGGED_CHECK(
      request.prefetch >= 0 && request.prefetch <= 1024,
      "[simulate] Expected a prefetch depth of 0 to 1,024, but got {} (--prefetch).", request.prefetch);
  return Walk(plan, request).run();
}

std::vector<std::string> advice(const ModelPlan& plan, const StepRequest& request, const StepResult& result) {
  std::vector<std::pair<double, std::string>> found;
  const auto bytes_of = [&](Use use) { return result.at_peak[at(static_cast<int>(use))]; };
  const auto try_with = [&](std::string text, const StepRequest& other) {
    const double saved = result.peak - simulate_step(plan, other).peak;
    if (saved > 0.01 * result.peak) found.emplace_back(saved, fmt::format("{} saves {}", text, bytes_text(saved)));
  };
  StepRequest other = request;
  if (request.checkpointing == Checkpointing::kNone) {
    other.checkpointing = Checkpointing::kFull;
    try_with("--checkpointing full", other);
  }
  other = request;
  if (!request.reshard_after_forward) {
    other.reshard_after_forward = true;
    try_with("resharding after forward (without --keep-gathered)", other);
  }
  other = request;
  if (request.prefetch > 0) {
    other.prefetch = request.prefetch - 1;
    try_with(fmt::format("--prefetch {}", other.prefetch), other);
  }
  other = request;
  if (request.tokens > 1) {
    other.tokens = request.tokens / 2;
    try_with(fmt::format("--tokens {} (two micro-batches)", other.tokens), other);
  }
  other = request;
  if (request.reduce_bytes > 2) {
    other.reduce_bytes = 2;
    try_with("--reduce-dtype bf16", other);
  }
  other = request;
  if (request.optimizer == Optimizer::kAdamW) {
    other.optimizer = Optimizer::kAdamW8bit;
    try_with("--optimizer adamw8bit", other);
  }
  const double held = bytes_of(Use::kParameters) + bytes_of(Use::kOptimizer) + bytes_of(Use::kGradients);
  if (held > 0.25 * result.peak) {
    found.emplace_back(
        held / 2, fmt::format("twice as many ranks in the shard group saves about {}", bytes_text(held / 2)));
  }
  std::ranges::stable_sort(found, [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<std::string> lines;
  for (auto& [saved, text] : found) lines.push_back(std::move(text));
  return lines;
}

}  // namespace ragged::sim
