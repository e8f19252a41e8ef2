// The JSON of metrics.h, apart because nlohmann's header is slow to compile.
#include <nlohmann/json.hpp>

#include "ragged/train/metrics.h"

namespace ragged::train {
namespace {

using Json = nlohmann::ordered_json;

Json to_object(const PersistentBytes& bytes) {
  return {
      {"parameters", bytes.parameters},
      {"gradients", bytes.gradients},
      {"optimizer_states", bytes.optimizer_states},
      {"total", bytes.total()},
  };
}

Json to_object(const StepBytes& bytes) {
  return {
      {"padding_bytes", bytes.padding_bytes},       {"gathered_bytes", bytes.gathered_bytes},
      {"reduced_bytes", bytes.reduced_bytes},       {"cast_bytes", bytes.cast_bytes},
      {"gradient_bytes", bytes.gradient_bytes},     {"copied_bytes", bytes.copied_bytes},
      {"peak_image_bytes", bytes.peak_image_bytes}, {"persistent_bytes", to_object(bytes.persistent_bytes)},
  };
}

}  // namespace

std::string to_json_line(const StepMetrics& metrics) {
  Json object;
  object["step"] = metrics.step;
  object["loss"] = metrics.loss;
  if (metrics.val_loss) object["val_loss"] = *metrics.val_loss;
  object["grad_norm"] = metrics.grad_norm;
  object["lr"] = metrics.lr;
  object["tokens_per_s"] = metrics.tokens_per_s;
  object["step_ms"] = metrics.step_ms;
  object["comm_wait"] = metrics.comm_wait;
  object["peak_bytes"] = metrics.peak_bytes;
  object["skipped"] = metrics.skipped;
  return object.dump();
}

std::string lines_up_to(std::string_view jsonl, Index last) {
  std::string kept;
  while (!jsonl.empty()) {
    const std::size_t end = jsonl.find('\n');
    if (end == std::string_view::npos) break;  // half written
    const std::string_view line = jsonl.substr(0, end);
    jsonl.remove_prefix(end + 1);
    const Json object = Json::parse(line, nullptr, false);
    if (!object.is_object() || !object.contains("step") || !object["step"].is_number_integer()) continue;
    if (object["step"].get<Index>() <= last) kept += std::string(line) + "\n";
  }
  return kept;
}

std::string to_json(const RunSummary& summary) {
  Json object;
  object["steps"] = summary.steps;
  object["parameters"] = summary.parameters;
  object["world_size"] = summary.world_size;
  object["param_dtype"] = summary.param_dtype;
  object["optimizer"] = summary.optimizer;
  object["skipped_steps"] = summary.skipped_steps;
  object["seconds"] = summary.seconds;
  object["loss"] = summary.loss;
  object["initial_val_loss"] = summary.initial_val_loss;
  object["val_loss"] = summary.val_loss;
  object["planned"] = to_object(summary.planned);
  object["measured"] = to_object(summary.measured);
  return object.dump(2);
}

}  // namespace ragged::train
