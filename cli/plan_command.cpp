#include "plan_command.h"

#include "output.h"
#include "ragged/base/text.h"
#include "ragged/sim/plan_report.h"

namespace ragged::cli {
namespace {

plan::PlanStrategy parse_strategy(const std::string& text) {
  RAGGED_CHECK(
      text == "auto" || text == "single" || text == "paper",
      "[plan] Expected auto, single or paper, but got '{}' (--strategy).", text);
  if (text == "single") return plan::PlanStrategy::kSingle;
  return text == "paper" ? plan::PlanStrategy::kPaper : plan::PlanStrategy::kAuto;
}

}  // namespace

void run_plan(const PlanArguments& arguments) {
  const LayoutArguments& layout = arguments.layout;
  const sim::Model model = sim::load_model(layout.model);
  const sim::ModelPlan plan = sim::plan_model(
      model,
      {.ranks = layout.ranks,
       .policy = {.rows = layout.rows, .flat = layout.flat_rows},
       .layers_per_bucket = layout.layers_per_bucket,
       .ragged_blocks = layout.ragged_blocks,
       .strategy = parse_strategy(arguments.strategy)});
  const std::vector<sim::EngineLayout> engines =
      arguments.compare ? sim::compare(plan) : std::vector<sim::EngineLayout>{};
  if (!layout.svg.empty()) write_file(layout.svg, sim::plan_svg(plan));
  if (layout.json) {
    print(sim::plan_json(plan, engines) + "\n");
    return;
  }
  const bool colour = stdout_has_colour();
  std::string text = sim::plan_text(plan, colour);
  if (!engines.empty()) text += "\n" + sim::compare_text(engines, colour);
  if (!layout.svg.empty()) text += "picture in " + layout.svg + "\n";
  print(text);
}

}  // namespace ragged::cli
