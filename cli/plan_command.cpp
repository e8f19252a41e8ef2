#include "plan_command.h"

#include "output.h"
#include "ragged/sim/plan_report.h"

namespace ragged::cli {

void run_plan(const PlanArguments& arguments) {
  const LayoutArguments& layout = arguments.layout;
  const sim::Model model = sim::load_model(layout.model);
  const sim::ModelPlan plan = sim::plan_model(
      model,
      {.ranks = layout.ranks,
       .policy = {.rows = layout.rows, .flat = layout.flat_rows},
       .layers_per_bucket = layout.layers_per_bucket,
       .ragged_blocks = layout.ragged_blocks});
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
