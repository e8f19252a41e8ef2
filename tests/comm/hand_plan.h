// Plans of more segments than the planner makes so far, for any world size: two uniform ones and a ragged one.
#pragma once

#include <vector>

#include "ragged/plan/bucket_plan.h"

namespace ragged::test {

struct HandPlan {
  int world_size = 1;
  Index first_shard = 0;   // elements a rank owns of the first uniform segment
  Index second_shard = 0;  // and of the second one
  /// What each rank owns of the ragged segment, by its position in the order that starts at `first_owner`.
  std::vector<Index> ragged{};
  int first_owner = 0;
  Index start_alignment = 1;  // and collective unit: shards are rounded up to it
  bool frozen_ragged = false;
};

/// Parameters, in module order: "k" and "q" (ragged), "w" and "b" (first segment), "v" (second). Module order isn't
/// image order, and each uniform segment holds padding where it has room for it. Passes plan::validate().
plan::BucketPlan make_hand_plan(const HandPlan& spec);

/// Plans with awkward sizes: each shard size in `shard_sizes`, owners rotated, some of them empty, borders aligned.
std::vector<HandPlan> awkward_plans(int world_size, const std::vector<Index>& shard_sizes);

std::string to_string(const HandPlan& spec);

}  // namespace ragged::test
