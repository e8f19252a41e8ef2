#include "tune_command.h"

#include "output.h"
#include "ragged/base/text.h"
#include "ragged/sim/text.h"
#include "ragged/sim/tune.h"

namespace ragged::cli {

void run_tune(const TuneArguments& arguments) {
  const LayoutArguments& layout = arguments.step.layout;
  const sim::Model model = sim::load_model(layout.model);
  const sim::TuneRequest request{
      .ranks = layout.ranks,
      .policy = {.rows = layout.rows, .flat = layout.flat_rows},
      .ragged_blocks = layout.ragged_blocks,
      .step = step_request(arguments.step),
      .memory = arguments.memory.empty() ? 0.0 : sim::parse_bytes(arguments.memory, "--memory"),
      .fixed_optimizer = arguments.fixed_optimizer};
  const sim::TuneResult result = sim::tune(model, request);
  print(
      layout.json ? sim::tune_json(model, request, result) + "\n"
                  : sim::tune_text(model, request, result, stdout_has_colour()));
}

}  // namespace ragged::cli
