// From parameters to a bucket plan; the search for one segment's shard size is in
// uniform_search.cpp.
#include "ragged/plan/planner.h"

#include <algorithm>
#include <map>

#include "ragged/plan/partition_search.h"
#include "ragged/plan/ragged_tail.h"
#include "ragged/plan/uniform_search.h"

namespace ragged::plan {
namespace {

constexpr int kMaxUniformSegments = 16;
constexpr Index kMaxRaggedBlocks = Index{1} << 20;
constexpr Index kMaxCost = Index{1} << 40;  // keeps sums far from overflow

std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}

Index checked_numel(const ParamSpec& param) {
  for (Index size : param.shape) {
    RAGGED_CHECK(size >= 0, "[plan] Expected sizes >= 0, but got {} (param '{}').", size, param.name);
  }
  try {
    return param.numel();
  } catch (const InvalidArgument&) {
    RAGGED_CHECK(false, "[plan] Expected a tensor of fewer than 2^63 elements, but got more (param '{}').", param.name);
  }
  return 0;
}

void check(const ParamSpec& param) {
  const Index numel = checked_numel(param);
  RAGGED_CHECK(
      param.block >= 1, "[plan] Expected a block of at least 1, but got {} (param '{}').", param.block, param.name);
  RAGGED_CHECK(
      numel == 0 || param.block <= numel,
      "[plan] Expected a block of at most the tensor's {} elements, but got {} (param '{}'). Use a "
      "smaller block, or whole() to keep the tensor on one rank.",
      numel, param.block, param.name);
  RAGGED_CHECK(
      param.restart == 0 || param.restart >= param.block,
      "[plan] Expected blocks to restart every {} elements or more, the size of a block, but got "
      "{} (param '{}').",
      param.block, param.restart, param.name);
}

void check(const PlanOptions& options) {
  RAGGED_CHECK(options.world_size >= 1, "[plan] Expected a world size of at least 1, but got {}.", options.world_size);
  RAGGED_CHECK(
      options.collective_unit >= 1, "[plan] Expected a collective unit of at least 1, but got {}.",
      options.collective_unit);
  RAGGED_CHECK(
      options.start_alignment >= 1 && options.collective_unit % options.start_alignment == 0,
      "[plan] Expected a start alignment that divides the collective unit {}, but got {}.", options.collective_unit,
      options.start_alignment);
  RAGGED_CHECK(
      options.max_uniform_segments >= 1 && options.max_uniform_segments <= kMaxUniformSegments,
      "[plan] Expected 1 to {} uniform segments, but got {}.", kMaxUniformSegments, options.max_uniform_segments);
  RAGGED_CHECK(
      options.max_ragged_blocks >= 0 && options.max_ragged_blocks <= kMaxRaggedBlocks,
      "[plan] Expected a limit of 0 to {} ragged blocks, but got {}.", kMaxRaggedBlocks, options.max_ragged_blocks);
  RAGGED_CHECK(
      options.first_owner >= 0 && options.first_owner < options.world_size,
      "[plan] Expected a first owner in [0, {}), but got {}.", options.world_size, options.first_owner);
  for (const Index cost : {options.cost.uniform_segment, options.cost.ragged_segment, options.cost.ragged_block}) {
    RAGGED_CHECK(
        cost >= 0 && cost <= kMaxCost, "[plan] Expected costs of 0 to {} elements, but got {}.", kMaxCost, cost);
  }
}

// Blocks that restart where they don't divide the run: borders at a fixed distance hit block
// borders in every run only if they hit run borders, so a whole run is the block.
Extent search_extent(const ParamSpec& param) {
  const Index numel = param.numel();
  const bool has_short_blocks = param.restart > 0 && param.restart % param.block != 0;
  if (!has_short_blocks || numel == 0) return {numel, param.block};
  return {numel, std::min(param.restart, numel)};
}

// The layout of one side of a bucket, trainable or frozen, before anyone owns anything: what
// buckets of equal shapes share.
struct Draft {
  struct Uniform {
    std::vector<int> params;  // by position
    UniformLayout layout;
  };
  std::vector<Uniform> uniform;
  std::vector<int> ragged;  // ascending, empty parameters last
  Index bound = 0;          // packing bound of the image
  // For the report.
  Index uniform_only = 0;
  Index ragged_bound = 0;
  bool is_exact = true;
};

class Drafter {
 public:
  Drafter(std::span<const ParamSpec> params, const PlanOptions& options) : params_(params), options_(options) {}

  Draft draft(bool trainable, Index max_ragged_blocks, bool with_uniform_only) const {
    Draft draft;
    std::vector<int> all;
    detail::PieceCounts pieces;  // for the bound: the true blocks, not whole runs
    for (int i = 0; at(i) < params_.size(); ++i) {
      const ParamSpec& param = params_[at(i)];
      if (param.trainable != trainable) continue;
      all.push_back(i);
      detail::add_pieces(pieces, param.numel(), param.block, param.restart);
    }
    if (all.empty()) return draft;
    draft.bound = options_.world_size * detail::bound_for_pieces(pieces, options_.world_size, options_.collective_unit);
    draft.ragged_bound = draft.bound;
    Draft::Uniform single = lay_out(all);
    draft.uniform_only = options_.world_size * single.layout.shard_size;
    const Index numel = numel_of(all);
    const bool has_padding = draft.uniform_only > numel;
    const bool may_gain = numel > 0 && (has_padding || options_.cost.ragged_segment < options_.cost.uniform_segment);
    if (options_.strategy == PlanStrategy::kAuto && may_gain) {
      partition(draft, all, max_ragged_blocks, with_uniform_only, std::move(single));
    } else {
      draft.uniform.push_back(std::move(single));
    }
    return draft;
  }

 private:
  Index numel_of(const std::vector<int>& params) const {
    Index sum = 0;
    for (int i : params) sum += params_[at(i)].numel();
    return sum;
  }

  Draft::Uniform lay_out(std::vector<int> params) const {
    std::vector<Extent> extents;
    extents.reserve(params.size());
    for (int i : params) extents.push_back(search_extent(params_[at(i)]));
    const auto search = options_.strategy == PlanStrategy::kPaper ? plan_uniform_paper : plan_uniform;
    UniformLayout layout = search(extents, options_.world_size, options_.collective_unit, options_.start_alignment);
    return {std::move(params), std::move(layout)};
  }

  // In the order that was found, unless module order does as well.
  Draft::Uniform lay_out_best(std::vector<int> params) const {
    std::vector<int> sorted = params;
    std::sort(sorted.begin(), sorted.end());
    Draft::Uniform by_module = lay_out(std::move(sorted));
    if (options_.order == PlanOrder::kModule || by_module.params == params) return by_module;
    Draft::Uniform found = lay_out(std::move(params));
    return found.layout.shard_size < by_module.layout.shard_size ? std::move(found) : std::move(by_module);
  }

  std::vector<Draft::Uniform> lay_out_segments(detail::Partition& partition, const std::vector<int>& ids) const {
    std::vector<Draft::Uniform> segments;
    for (std::vector<int>& segment : partition.segments) {
      for (int& i : segment) i = ids[at(i)];
      segments.push_back(lay_out_best(std::move(segment)));
    }
    // Segments with long shards first; equal ones in module order.
    std::stable_sort(segments.begin(), segments.end(), [](const Draft::Uniform& a, const Draft::Uniform& b) {
      return a.layout.shard_size > b.layout.shard_size;
    });
    return segments;
  }

  Index image_of(const std::vector<Draft::Uniform>& segments) const {
    Index sum = 0;
    for (const Draft::Uniform& segment : segments) sum += options_.world_size * segment.layout.shard_size;
    return sum;
  }

  Index tail_cost(const std::vector<int>& ragged) const {
    if (ragged.empty()) return 0;
    Index image = 0;
    Index blocks = 0;
    for (int i : ragged) {
      image = round_up(image, options_.start_alignment) + params_[at(i)].numel();
      blocks += detail::num_blocks(params_[at(i)]);
    }
    return round_up(image, options_.collective_unit) + options_.cost.ragged_segment +
        options_.cost.ragged_block * blocks;
  }

  Index cost_of(const std::vector<Draft::Uniform>& segments, const std::vector<int>& ragged) const {
    const auto count = static_cast<Index>(segments.size());
    return image_of(segments) + count * options_.cost.uniform_segment + tail_cost(ragged);
  }

  void partition(
      Draft& draft, const std::vector<int>& all, Index max_ragged_blocks, bool with_uniform_only,
      Draft::Uniform single) const {
    std::vector<int> ids;  // of those with elements
    std::vector<int> empty;
    std::vector<detail::SearchTensor> tensors;
    for (int i : all) {
      const ParamSpec& param = params_[at(i)];
      if (param.numel() == 0) {
        empty.push_back(i);
        continue;
      }
      ids.push_back(i);
      tensors.push_back({search_extent(param), param.block, param.restart, detail::num_blocks(param)});
    }
    const std::vector<Draft::Uniform> alone{std::move(single)};
    const Index cost_of_one = cost_of(alone, {});
    detail::PartitionSearch search(tensors, options_);
    const auto consider = [&](detail::Partition found) {
      draft.is_exact = found.is_exact;
      std::vector<Draft::Uniform> segments = lay_out_segments(found, ids);
      for (int& i : found.ragged) i = ids[at(i)];
      // The one segment in module order is exact where the search may have been thinned out.
      if (cost_of_one <= cost_of(segments, found.ragged)) {
        draft.uniform = alone;
        draft.ragged.clear();
        return;
      }
      if (segments.empty()) {
        found.ragged.insert(found.ragged.end(), empty.begin(), empty.end());
      } else if (!empty.empty()) {
        std::vector<int> with_empty = segments[0].params;
        with_empty.insert(with_empty.end(), empty.begin(), empty.end());
        segments[0] = lay_out(std::move(with_empty));
      }
      draft.uniform = std::move(segments);
      draft.ragged = std::move(found.ragged);
    };
    if (with_uniform_only) {
      consider(search.best(0));
      draft.uniform_only = image_of(draft.uniform);
    }
    if (max_ragged_blocks == 0 && with_uniform_only) return;
    const bool was_exact = draft.is_exact;
    consider(search.best(max_ragged_blocks));
    draft.is_exact = draft.is_exact && was_exact;
    draft.ragged_bound = std::min(draft.bound, search.bound(max_ragged_blocks));
  }

  std::span<const ParamSpec> params_;
  const PlanOptions& options_;
};

// A bucket's two sides, and what the report says of them.
struct BucketDraft {
  std::vector<Draft> sides;  // trainable, frozen
  PlanReport report;
};

BucketDraft draft_bucket(std::span<const ParamSpec> params, const PlanOptions& options, bool with_uniform_only) {
  BucketDraft bucket;
  const Drafter drafter(params, options);
  Index blocks_left = options.max_ragged_blocks;
  PlanReport& report = bucket.report;
  for (const bool trainable : {true, false}) {
    Draft draft = drafter.draft(trainable, blocks_left, with_uniform_only);
    for (int i : draft.ragged) {
      report.ragged_numel += params[at(i)].numel();
      report.ragged_blocks += detail::num_blocks(params[at(i)]);
    }
    blocks_left = options.max_ragged_blocks - report.ragged_blocks;
    report.uniform_only += draft.uniform_only;
    report.uniform_bound += draft.bound;
    report.bound += draft.ragged_bound;
    report.num_ragged_segments += draft.ragged.empty() ? 0 : 1;
    for (const Draft::Uniform& uniform : draft.uniform) {
      report.num_uniform_segments += uniform.layout.shard_size > 0 ? 1 : 0;
    }
    report.is_exact = report.is_exact && draft.is_exact;
    bucket.sides.push_back(std::move(draft));
  }
  for (const ParamSpec& param : params) report.numel += param.numel();
  return bucket;
}

void add_uniform(BucketPlan& plan, const Draft::Uniform& uniform, bool trainable) {
  const Index shard_size = uniform.layout.shard_size;
  Segment segment{
      .image_offset = plan.image_numel(),
      .numel = plan.world_size * shard_size,
      .shard_size = shard_size,
      .trainable = trainable,
      .params = uniform.params};
  for (std::size_t i = 0; i < uniform.params.size(); ++i) {
    plan.starts[at(uniform.params[i])] = segment.image_offset + uniform.layout.starts[i];
  }
  segment.owners.reserve(at(plan.world_size));
  for (Index rank = 0; rank < plan.world_size; ++rank) {
    const Index begin = segment.image_offset + rank * shard_size;
    segment.owners.push_back({begin, begin + shard_size});
  }
  plan.segments.push_back(std::move(segment));
}

// Elements that each rank owns in ragged tails.
using Loads = std::vector<Index>;

void add_ragged(BucketPlan& plan, const std::vector<int>& params, bool trainable, int first_owner, Loads& loads) {
  Segment segment{
      .kind = SegmentKind::kRagged, .image_offset = plan.image_numel(), .trainable = trainable, .params = params};
  std::vector<detail::TailTensor> tensors;
  Index cursor = segment.image_offset;
  for (int i : params) {
    const ParamSpec& param = plan.params[at(i)];
    cursor = round_up(cursor, plan.start_alignment);
    plan.starts[at(i)] = cursor;
    if (param.numel() > 0) tensors.push_back({&param, cursor});
    cursor += param.numel();
  }
  segment.numel = round_up(cursor, plan.collective_unit) - segment.image_offset;
  segment.owners = detail::tail_owners(tensors, plan.world_size, first_owner, loads);
  for (int rank = 0; rank < plan.world_size; ++rank) loads[at(rank)] += segment.owners[at(rank)].size();
  plan.segments.push_back(std::move(segment));
}

BucketPlan build(
    const BucketDraft& draft, std::vector<ParamSpec> params, const PlanOptions& options, int first_owner,
    Loads& loads) {
  BucketPlan plan{
      .world_size = options.world_size,
      .collective_unit = options.collective_unit,
      .start_alignment = options.start_alignment,
      .starts = std::vector<Index>(params.size(), 0),
      .lower_bound = draft.report.uniform_bound};
  plan.params = std::move(params);
  bool trainable = true;
  for (const Draft& side : draft.sides) {
    for (const Draft::Uniform& uniform : side.uniform) add_uniform(plan, uniform, trainable);
    if (!side.ragged.empty()) add_ragged(plan, side.ragged, trainable, first_owner, loads);
    trainable = false;
  }
  return plan;
}

std::vector<ParamSpec> checked_params(std::span<const ParamSpec> params, const PlanOptions& options) {
  // A quarter of what the search can count, so that it names the parameter and the segments' sum
  // fits.
  const Index limit = std::numeric_limits<Index>::max() / 16 / options.world_size;
  Index numel = 0;
  std::vector<ParamSpec> result(params.begin(), params.end());
  for (ParamSpec& param : result) {
    check(param);
    RAGGED_CHECK(
        param.numel() <= limit - numel,
        "[plan] Expected a bucket of at most {} elements for {} ranks, but got more (param '{}'). "
        "Make it smaller.",
        limit, options.world_size, param.name);
    numel += param.numel();
    if (options.flat_rows) param.restart = 0;
  }
  return result;
}

// All that a plan depends on but the names.
std::vector<Index> shape_key(std::span<const ParamSpec> params) {
  std::vector<Index> key;
  for (const ParamSpec& param : params) {
    key.push_back(static_cast<Index>(param.shape.size()));
    key.insert(key.end(), param.shape.begin(), param.shape.end());
    key.insert(key.end(), {param.block, param.restart, param.trainable ? 1 : 0});
  }
  return key;
}

}  // namespace

BucketPlan plan_bucket(std::span<const ParamSpec> params, const PlanOptions& options, PlanReport* report) {
  check(options);
  std::vector<ParamSpec> checked = checked_params(params, options);
  const BucketDraft draft = draft_bucket(checked, options, report != nullptr);
  Loads loads(at(options.world_size), 0);
  BucketPlan plan = build(draft, std::move(checked), options, options.first_owner, loads);
  if (report != nullptr) {
    *report = draft.report;
    report->image = plan.image_numel();
  }
  return plan;
}

BucketPlan plan_each_evenly(std::span<const ParamSpec> params, int world_size) {
  BucketPlan plan;
  plan.world_size = world_size;
  plan.params.assign(params.begin(), params.end());
  plan.starts.assign(params.size(), 0);
  Index offset = 0;
  for (const bool trainable : {true, false}) {  // trainable segments come first
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (params[i].trainable != trainable) continue;
      BucketPlan one = plan_bucket(
          params.subspan(i, 1),
          {.world_size = world_size, .collective_unit = 1, .start_alignment = 1, .strategy = PlanStrategy::kSingle});
      plan.lower_bound += one.lower_bound;
      plan.starts[i] = one.starts[0] + offset;
      for (Segment& segment : one.segments) {
        segment.image_offset += offset;
        for (Interval& owner : segment.owners) owner = owner.shifted(offset);
        for (int& param : segment.params) param = static_cast<int>(i);
        plan.segments.push_back(std::move(segment));
      }
      offset += one.image_numel();
    }
  }
  return plan;
}

std::vector<BucketPlan> plan_buckets(
    std::span<const std::vector<ParamSpec>> buckets, const PlanOptions& options, std::vector<PlanReport>* reports) {
  check(options);
  std::vector<BucketPlan> plans;
  plans.reserve(buckets.size());
  std::map<std::vector<Index>, BucketDraft> drafts;  // by shapes
  Index first_owner = options.first_owner;
  Loads loads(at(options.world_size), 0);
  for (const std::vector<ParamSpec>& bucket : buckets) {
    std::vector<ParamSpec> checked = checked_params(bucket, options);
    const auto [found, is_new] = drafts.try_emplace(shape_key(checked));
    BucketDraft& draft = found->second;
    if (is_new) draft = draft_bucket(checked, options, reports != nullptr);
    plans.push_back(build(draft, std::move(checked), options, static_cast<int>(first_owner), loads));
    first_owner = (first_owner + draft.report.ragged_blocks) % options.world_size;
    if (reports != nullptr) {
      reports->push_back(draft.report);
      reports->back().image = plans.back().image_numel();
    }
  }
  return plans;
}

}  // namespace ragged::plan
