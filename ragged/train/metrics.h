// What a run reports: a console line and a JSON line a step, and at the end one summary that holds
// the measured bytes of a step against the planned ones. Values in, text out; nothing is measured
// here.
#pragma once

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>

#include "ragged/base/math.h"

namespace ragged::train {

struct StepMetrics {
  Index step = 0;                       // 1 for the first
  double loss = 0.0;                    // of the global batch, before the step; nats per token
  std::optional<double> val_loss = {};  // after the step
  double grad_norm = 0.0;               // before clipping
  double lr = 0.0;
  double tokens_per_s = 0.0;  // of all ranks together
  double step_ms = 0.0;
  double comm_wait = 0.0;  // share of the step in which this rank waited for communication, 0 to 1
  Index peak_bytes = 0;    // most memory this process has had
  Index skipped = 0;       // steps so far that changed nothing, since loss or norm weren't finite
};

/// Bytes that a rank holds from one step to the next.
struct PersistentBytes {
  Index parameters = 0;  // masters
  Index gradients = 0;
  Index optimizer_states = 0;
  Index total() const { return parameters + gradients + optimizer_states; }
  friend bool operator==(const PersistentBytes&, const PersistentBytes&) = default;
};

/// Bytes of one step on one rank, as fsdp::StepForecast counts them.
struct StepBytes {
  Index padding_bytes = 0;
  Index gathered_bytes = 0;
  Index reduced_bytes = 0;
  Index cast_bytes = 0;      // masters into images
  Index gradient_bytes = 0;  // gradients into reduce buffers, by a cast or by the operation that computes them
  Index copied_bytes = 0;
  Index peak_image_bytes = 0;
  PersistentBytes persistent_bytes = {};
  friend bool operator==(const StepBytes&, const StepBytes&) = default;
};

struct RunSummary {
  Index steps = 0;
  Index parameters = 0;
  int world_size = 1;
  std::string param_dtype = {};
  std::string optimizer = {};     // the config's kind
  Index skipped_steps = 0;        // see StepMetrics::skipped
  double seconds = 0.0;           // of the training loop
  double loss = 0.0;              // of the last step
  double initial_val_loss = 0.0;  // before the first step
  double val_loss = 0.0;          // after the last
  StepBytes planned = {};
  StepBytes measured = {};
};

/// One line of metrics.jsonl, without a line break. val_loss is left out where there is none; what
/// isn't finite is null.
std::string to_json_line(const StepMetrics& metrics);
/// The lines of a metrics.jsonl for the steps up to `last`. What isn't such a line is left out, so the last one of a
/// run that was killed in the middle of it.
std::string lines_up_to(std::string_view jsonl, Index last);
/// An indented document.
std::string to_json(const RunSummary& summary);

/// "step 10/400  loss 2.8190  ..."
std::string console_line(const StepMetrics& metrics, Index steps);
/// planned next to measured, a line a quantity, marked where they are equal.
std::string bytes_table(const StepBytes& planned, const StepBytes& measured);
/// "12.1 MiB".
std::string format_bytes(Index bytes);

/// Writes a file that is there as a whole or not at all: to a temporary name, then renamed. Throws
/// InvalidArgument where it can't.
void write_file(const std::filesystem::path& path, std::string_view text);

/// The reports of one run; does nothing on ranks other than the first.
class Reporter {
 public:
  /// Makes `dir` and starts metrics.jsonl anew, or, for a run that was resumed, keeps its lines up to that step. Throws
  /// InvalidArgument when the folder can't be written.
  Reporter(bool is_main, std::filesystem::path dir, Index resumed_step = 0);

  /// A line of prose to the console.
  void say(std::string_view line);
  void step(const StepMetrics& metrics, Index steps, bool on_console);
  /// Prints the table and writes summary.json.
  void finish(const RunSummary& summary);

  const std::filesystem::path& dir() const { return dir_; }

 private:
  bool is_main_;
  bool has_colour_;
  std::filesystem::path dir_;
  std::ofstream jsonl_;
};

}  // namespace ragged::train
