#include "ragged/sim/model_plan.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "ragged/layout/box.h"
#include "ragged/plan/planner.h"
#include "ragged/sim/peers.h"
#include "ragged/sim/text.h"

namespace ragged::sim {
namespace {

using plan::BucketPlan;
using plan::InventoryTensor;
using plan::InventoryUnit;
using plan::ParamSpec;
using plan::Segment;
using plan::SegmentKind;

std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}

plan::PlanOptions plan_options(const LayoutRequest& request) {
  plan::PlanOptions options;
  options.world_size = request.ranks;
  options.collective_unit = request.collective_unit;
  options.start_alignment = request.collective_unit;
  options.strategy = request.strategy;
  if (request.ragged_blocks >= 0) options.max_ragged_blocks = request.ragged_blocks;
  return options;
}

Index cut_in_ragged(const BucketPlan& plan, const Segment& segment, int param) {
  const ParamSpec& spec = plan.params[at(param)];
  const Index run = spec.restart > 0 ? spec.restart : spec.numel();
  std::set<Index> cut;
  for (const layout::Interval& owner : segment.owners) {
    const Index position = owner.begin - plan.starts[at(param)];
    if (owner.empty() || position <= 0 || position >= spec.numel()) continue;
    if (position % run % spec.block != 0)
      cut.insert(position / run * ceil_div(run, spec.block) + position % run / spec.block);
  }
  return static_cast<Index>(cut.size());
}

Index count_cut_blocks(const BucketPlan& plan) {
  Index cut = 0;
  for (const Segment& segment : plan.segments) {
    for (const int param : segment.params) {
      const ParamSpec& spec = plan.params[at(param)];
      const Index start = plan.starts[at(param)] - segment.image_offset;
      cut += segment.kind == SegmentKind::kUniform
          ? sim::blocks_cut(start, spec.numel(), spec.block, spec.restart, segment.shard_size)
          : cut_in_ragged(plan, segment, param);
    }
  }
  return cut;
}

Index count_boxes(const BucketPlan& plan) {
  Index count = 0;
  for (const Segment& segment : plan.segments) {
    for (const int param : segment.params) {
      const layout::Interval whole = plan.image_interval(param);
      if (whole.empty()) continue;
      std::size_t first = 0;
      std::size_t end = segment.owners.size();
      if (segment.kind == SegmentKind::kUniform) {  // only the ranks that have some of it
        first = static_cast<std::size_t>((whole.begin - segment.image_offset) / segment.shard_size);
        end = static_cast<std::size_t>((whole.end - 1 - segment.image_offset) / segment.shard_size) + 1;
      }
      for (std::size_t rank = first; rank < end; ++rank) {
        const layout::Interval own = intersect(whole, segment.owners[rank]);
        if (own.empty()) continue;
        count += static_cast<Index>(layout::boxes(plan.params[at(param)].shape, own.shifted(-whole.begin)).size());
      }
    }
  }
  return count;
}

// Units of a kind are alike but for a remainder when layers are merged.
std::string kind_key(const InventoryUnit& unit) {
  return fmt::format("{}|{}", unit.kind, unit.tensors.size());
}

int layers_in(const InventoryUnit& unit) {
  return 1 + static_cast<int>(std::ranges::count(unit.name, '+'));
}

// The largest count at most `rows`, made by halving where that works, that divides `all`.
Index dividing_rows(Index rows, Index all) {
  Index fewer = rows;
  while (fewer % 2 == 0 && all % fewer != 0) fewer /= 2;
  return all % fewer == 0 ? fewer : std::gcd(rows, all);
}

void remark_on_blocks(const UnitKind& kind, ModelPlan& model) {
  const LayoutRequest& request = model.request;
  const Index share = ceil_div(kind.numel, request.ranks);
  Index largest = 0;
  std::size_t largest_at = 0;
  std::set<Index> told;
  for (std::size_t i = 0; i < kind.tensors.size(); ++i) {
    const ParamSpec& spec = kind.plan.params[i];
    const std::size_t dims = spec.shape.size();
    if (spec.block > largest && dims > 1) {
      largest = spec.block;
      largest_at = i;
    }
    if (spec.restart == 0 || spec.restart % spec.block == 0 || dims < 2) continue;
    const Index rows = spec.shape[dims - 2];
    if (!told.insert(rows).second) continue;
    model.remarks.push_back(fmt::format(
        "{}: {} rows don't divide the {} rows of an expert of '{}'. Use --rows {}, or --flat-rows where a block may "
        "reach into the next expert.",
        kind.name, request.policy.rows, grouped(rows), kind.tensors[i].name, dividing_rows(request.policy.rows, rows)));
  }
  if (largest <= share) return;
  const InventoryTensor& tensor = kind.tensors[largest_at];
  const Index columns = std::max<Index>(1, tensor.shape.back());
  std::string remedy = fmt::format("Shard over at most {} ranks", grouped(std::max<Index>(1, kind.numel / largest)));
  if (share / columns >= 1)
    remedy += fmt::format(", use --rows {}", std::bit_floor(static_cast<std::uint64_t>(share / columns)));
  const Index layers = std::min<Index>(kind.layers * ceil_div(largest, share), Index{kind.count} * kind.layers);
  if (kind.is_layer && layers > kind.layers) {
    remedy += fmt::format(", or put more layers in a bucket (--layers-per-bucket {})", layers);
  }
  model.remarks.push_back(fmt::format(
      "{}: a block of '{}' has {} elements, more than a fair share of {} on {} ranks. {}.", kind.name, tensor.name,
      grouped(largest), grouped(share), request.ranks, remedy));
}

}  // namespace

int UnitKind::collectives() const {
  return static_cast<int>(std::ranges::count_if(plan.segments, [](const Segment& s) { return s.numel > 0; }));
}

Index ModelPlan::largest_load() const {
  return load.empty() ? 0 : *std::ranges::max_element(load);
}

double ModelPlan::fraction(Index padding_elements) const {
  return static_cast<double>(padding_elements) / static_cast<double>(numel);
}

double ModelPlan::largest_over_mean() const {
  return static_cast<double>(largest_load()) * request.ranks / static_cast<double>(numel);
}

ModelPlan plan_model(const Model& source, const LayoutRequest& request) {
  RAGGED_CHECK(request.ranks >= 1, "[plan] Expected at least 1 rank, but got {} (--ranks).", request.ranks);
  constexpr int kMostRanks = 1 << 20;
  RAGGED_CHECK(
      request.ranks <= kMostRanks, "[plan] Expected at most {} ranks, but got {} (--ranks).", kMostRanks,
      request.ranks);
  RAGGED_CHECK(
      request.policy.rows >= 1, "[plan] Expected at least 1 row a block, but got {} (--rows).", request.policy.rows);
  RAGGED_CHECK(
      request.layers_per_bucket >= 1, "[plan] Expected at least 1 layer a bucket, but got {} (--layers-per-bucket).",
      request.layers_per_bucket);
  ModelPlan model;
  model.model = source.inventory.name;
  model.request = request;
  model.facts = source.facts;
  model.remarks = source.remarks;
  model.numel = source.inventory.numel();
  RAGGED_CHECK(model.numel > 0, "[plan] Expected a model with parameters, but got none ('{}').", model.model);
  const plan::Inventory inventory = plan::merge_layers(source.inventory, request.layers_per_bucket);

  std::map<std::string, int> known;
  for (const InventoryUnit& unit : inventory.units) {
    const auto [found, is_new] = known.try_emplace(kind_key(unit), static_cast<int>(model.kinds.size()));
    model.unit_kinds.push_back(found->second);
    model.unit_names.push_back(unit.name);
    if (!is_new) {
      ++model.kinds[at(found->second)].count;
      continue;
    }
    UnitKind kind{.name = unit.kind, .is_layer = unit.is_layer, .layers = layers_in(unit), .tensors = unit.tensors};
    if (kind.layers > 1) kind.name += fmt::format(" ({} layers each)", kind.layers);
    kind.numel = unit.numel();
    model.kinds.push_back(std::move(kind));
  }
  std::vector<std::vector<ParamSpec>> buckets;
  for (const InventoryUnit& unit : inventory.units) buckets.push_back(plan::param_specs(unit, request.policy));
  std::vector<plan::PlanReport> reports;
  const auto start = std::chrono::steady_clock::now();
  std::vector<BucketPlan> plans =
      plan::plan_buckets(buckets, plan_options(request), request.with_bounds ? &reports : nullptr);
  model.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  // Owners of ragged tails differ from unit to unit, so loads are summed over units, the rest over kinds.
  model.load.assign(at(request.ranks), 0);
  for (std::size_t u = 0; u < plans.size(); ++u) {
    for (const Segment& segment : plans[u].segments) {
      for (std::size_t rank = 0; rank < segment.owners.size(); ++rank) {
        model.load[rank] += segment.owners[rank].size();
      }
    }
    UnitKind& kind = model.kinds[at(model.unit_kinds[u])];
    if (!kind.plan.segments.empty()) continue;
    kind.plan = std::move(plans[u]);
    if (request.with_bounds) kind.report = reports[u];
  }
  for (UnitKind& kind : model.kinds) {
    kind.blocks_cut = count_cut_blocks(kind.plan);
    kind.boxes = request.with_bounds ? count_boxes(kind.plan) : 0;
    model.boxes += kind.count * kind.boxes;
    model.padding += kind.count * kind.plan.padding();
    model.blocks_cut += kind.count * kind.blocks_cut;
    model.collectives += kind.count * kind.collectives();
    if (request.with_bounds) {
      model.lower_bound += kind.count * (kind.report.bound - kind.numel);
      model.packing_bound += kind.count * (kind.report.uniform_bound - kind.numel);
      model.uniform_only += kind.count * (kind.report.uniform_only - kind.numel);
    }
    remark_on_blocks(kind, model);
  }
  if (request.with_soap) model.soap_bytes = optimizer_bytes(model, Optimizer::kSoap);
  return model;
}

}  // namespace ragged::sim
