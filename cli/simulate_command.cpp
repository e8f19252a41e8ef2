#include "simulate_command.h"

#include "output.h"
#include "ragged/base/dtype.h"
#include "ragged/base/text.h"
#include "ragged/sim/step_report.h"

namespace ragged::cli {
namespace {

sim::Checkpointing parse_checkpointing(const std::string& text) {
  RAGGED_CHECK(
      text == "none" || text == "full", "[simulate] Expected none or full, but got '{}' (--checkpointing).", text);
  return text == "full" ? sim::Checkpointing::kFull : sim::Checkpointing::kNone;
}

}  // namespace

sim::StepRequest step_request(const SimulateArguments& arguments) {
  return {
      .device = sim::load_device(arguments.device),
      .tokens = arguments.tokens,
      .sequence = arguments.sequence,
      .optimizer = sim::parse_optimizer(arguments.optimizer),
      .checkpointing = parse_checkpointing(arguments.checkpointing),
      .reshard_after_forward = !arguments.keep_gathered,
      .prefetch = arguments.prefetch,
      .reduce_bytes = static_cast<double>(item_size(parse_dtype(arguments.reduce_dtype)))};
}

void run_simulate(const SimulateArguments& arguments) {
  const LayoutArguments& layout = arguments.layout;
  RAGGED_CHECK(layout.ranks >= 1, "[simulate] Expected at least 1 rank, but got {} (--ranks).", layout.ranks);
  const int shard = arguments.shard == 0 ? layout.ranks : arguments.shard;
  RAGGED_CHECK(
      shard >= 1 && layout.ranks % shard == 0,
      "[simulate] Expected a shard group that divides the {} ranks, but got {} (--shard).", layout.ranks, shard);
  sim::StepRequest request = step_request(arguments);
  request.replicas = layout.ranks / shard;
  const sim::ModelPlan plan = sim::plan_model(
      sim::load_model(layout.model),
      {.ranks = shard,
       .policy = {.rows = layout.rows, .flat = layout.flat_rows},
       .layers_per_bucket = layout.layers_per_bucket,
       .ragged_blocks = layout.ragged_blocks,
       .with_soap = request.optimizer == sim::Optimizer::kSoap});
  const sim::StepResult result = sim::simulate_step(plan, request);
  if (!layout.svg.empty()) write_file(layout.svg, sim::step_svg(plan, request, result));
  if (!arguments.trace.empty()) write_file(arguments.trace, sim::step_trace(result));
  if (layout.json) {
    print(sim::step_json(plan, request, result) + "\n");
    return;
  }
  std::string text = sim::step_text(plan, request, result, stdout_has_colour());
  if (!layout.svg.empty()) text += "picture in " + layout.svg + "\n";
  if (!arguments.trace.empty()) text += "trace in " + arguments.trace + "; open it in Perfetto or chrome://tracing\n";
  print(text);
}

}  // namespace ragged::cli
