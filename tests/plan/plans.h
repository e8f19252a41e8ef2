// Plans for tests: one written by hand with every kind of segment that the planner doesn't make
// yet, and random buckets. And the slow, obvious twin of validate(): every element on its own.
#pragma once

#include <string>

#include "ragged/plan/bucket_plan.h"
#include "ragged/plan/inventory.h"
#include "ragged/plan/planner.h"
#include "tests/support/seeded.h"

namespace ragged::testing {

/// 3 ranks: a uniform segment of "w" and "b" (image [0, 18)), a ragged one of "k" and "q" whose
/// owners are ranks 1, 0, 2 in that order ([18, 40)), and a frozen uniform one of "empty" and "e"
/// ([40, 64)). See bucket_plan_test.cpp for who owns what.
plan::BucketPlan hand_written_plan();

/// A bucket of up to 6 parameters of up to 4 dims, blocks of every kind, some empty, frozen or with
/// restarts.
std::vector<plan::ParamSpec> random_bucket(Seeded& random);
plan::PlanOptions random_options(Seeded& random);

/// models/<name>.json.
plan::Inventory bundled_model(const std::string& name);

/// Walks over all elements of image and shards: each element of a parameter on one rank, nothing
/// inside a parameter but itself, no block on two ranks, starts aligned, equal shards, and the
/// plan's own accounts (ranges, owned, local_offset, placement, gaps, padding) the same as the
/// walk's.
void expect_every_element_in_place(const plan::BucketPlan& plan);

}  // namespace ragged::testing
