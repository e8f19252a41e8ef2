// Plans to and from JSON text, with a format number. Parsing validates: a file that isn't a plan is
// an InvalidArgument that says where, never a half-filled value.
#pragma once

#include <string>
#include <string_view>

#include "ragged/plan/bucket_plan.h"

namespace ragged::plan {

std::string to_json(const BucketPlan& plan);
BucketPlan plan_from_json(std::string_view text);

}  // namespace ragged::plan
