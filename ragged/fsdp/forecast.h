// What one training step will move and hold, computed from the plans alone before anything runs; counters are held
// against it. Pure: no tensors, no communication.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "ragged/fsdp/issue_list.h"
#include "ragged/plan/bucket_plan.h"

namespace ragged::fsdp {

/// One bucket of a unit.
struct GroupForecastInput {
  const plan::BucketPlan* plan = nullptr;
  Index param_bytes = 2;              // bytes an element of the image
  Index reduce_bytes = 4;             // of the reduce buffer
  bool gathers_from_masters = false;  // the image has their dtype: no cast before a gather of several ranks
  bool narrows = false;    // gradients reduced in the backward that computed them travel in the image's dtype
  bool is_behind = false;  // see [Note: what lies behind the inner units]
};

/// One unit as the forecast needs it.
struct UnitForecastInput {
  std::string name{};
  std::vector<GroupForecastInput> groups{};  // empty: no parameters of its own
  int parent = -1;
  bool reshard_after_forward = true;
  MergeTraits gather{};  // a unit with one group alone is ever merged
  MergeTraits reduction{};

  Index image_bytes() const;
  bool reduces() const;  // has trainable segments
  bool reduces_behind() const;
};

/// Which units have units inside; by index.
std::vector<char> ancestors(std::span<const int> parents);

struct StepOptions {
  int rank = 0;  // of the shard group
  int backward_prefetch = 1;
  int forward_prefetch = 0;
  bool overlap_reductions = true;
  bool drops_unheld = false;  // images of units around others go when backward enters those
  Index merge_bytes = 0;
  int micro_batches = 1;
  bool sync_each_micro_batch = false;  // false: reduce in the last one only
};

/// Bytes of one step on one rank. "Gathered" and "reduced" count the whole image of each collective once; nothing
/// is counted on a world of one, which moves nothing. Casts are the bytes written.
struct StepForecast {
  Index padding_bytes = 0;  // of all images
  Index gathered_bytes = 0;
  Index reduced_bytes = 0;
  Index cast_in_bytes = 0;      // masters into this rank's ranges of the images
  Index cast_grad_bytes = 0;    // gradients into the reduce buffers, by a cast or by the operation that computes them
  Index added_grad_bytes = 0;   // gradients added to those of an earlier micro-batch in the same buffer
  Index copied_bytes = 0;       // any other copy: out of merged gathers and into merged reductions
  Index peak_image_bytes = 0;   // exact, by walking the issue list
  Index image_bytes_bound = 0;  // open ancestors + (prefetch + 1) x the largest other unit + one merged gather
  Index peak_reduce_bytes = 0;
  int gathers = 0;
  int reduces = 0;
};

/// `events`: the forward of one micro-batch, as recorded or as module order gives it (see module_order_events).
StepForecast forecast_step(
    std::span<const UnitForecastInput> units, std::span<const ForwardEvent> events, const StepOptions& options);

/// The events of a forward that runs each unit once in module order; `parent[i]` < i, the root is 0.
std::vector<ForwardEvent> module_order_events(std::span<const int> parent);

}  // namespace ragged::fsdp
