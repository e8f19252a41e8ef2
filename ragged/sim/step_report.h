// What `ragged simulate` shows of a step: tables, JSON, a picture, a trace.
#pragma once

#include <string>

#include "ragged/sim/step.h"

namespace ragged::sim {

std::string step_text(const ModelPlan& plan, const StepRequest& request, const StepResult& result, bool colour);
std::string step_json(const ModelPlan& plan, const StepRequest& request, const StepResult& result);
/// Memory over the step, stacked by use, above what compute and network do.
std::string step_svg(const ModelPlan& plan, const StepRequest& request, const StepResult& result);
/// Chrome's trace format: two tracks and a counter; Perfetto reads it.
std::string step_trace(const StepResult& result);

}  // namespace ragged::sim
