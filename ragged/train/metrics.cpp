#include "ragged/train/metrics.h"

#include <cstdio>
#include <sstream>
#include <utility>

#include <fmt/format.h>

#include "ragged/base/text.h"

namespace ragged::train {
std::string format_bytes(Index bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < std::size(kUnits)) {
    value /= 1024.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string console_line(const StepMetrics& m, Index steps) {
  std::string line = fmt::format(
      "step {:>{}}/{}  loss {:.4f}  norm {:.3f}  lr {:.2e}  {:>6.0f} tok/s  {:>5.0f} ms  wait "
      "{:>2.0f}%  mem {}",
      m.step, fmt::formatted_size("{}", steps), steps, m.loss, m.grad_norm, m.lr, m.tokens_per_s, m.step_ms,
      100.0 * m.comm_wait, format_bytes(m.peak_bytes));
  if (m.skipped > 0) line += fmt::format("  skipped {}", m.skipped);
  if (m.val_loss) line += fmt::format("  val {:.4f}", *m.val_loss);
  return line;
}

std::string bytes_table(const StepBytes& planned, const StepBytes& measured) {
  std::string text = fmt::format("{:<34}{:>16}{:>16}\n", "bytes of one step on this rank", "planned", "measured");
  const auto line = [&text](const char* name, Index plan, Index measure) {
    text += fmt::format(
        "  {:<32}{:>16}{:>16}  {}\n", name, grouped(plan), grouped(measure), plan == measure ? "equal" : "DIFFERS");
  };
  const auto row = [&](const char* name, Index StepBytes::*field) { line(name, planned.*field, measured.*field); };
  const auto held = [&](const char* name, Index PersistentBytes::*field) {
    line(name, planned.persistent_bytes.*field, measured.persistent_bytes.*field);
  };
  row("padding", &StepBytes::padding_bytes);
  row("gathered", &StepBytes::gathered_bytes);
  row("reduced", &StepBytes::reduced_bytes);
  row("masters cast", &StepBytes::cast_bytes);
  row("gradients, cast or in place", &StepBytes::gradient_bytes);
  row("copied", &StepBytes::copied_bytes);
  row("peak of unsharded images", &StepBytes::peak_image_bytes);
  held("parameters, held", &PersistentBytes::parameters);
  held("gradients, held", &PersistentBytes::gradients);
  held("optimizer states, held", &PersistentBytes::optimizer_states);
  return text;
}

void write_file(const std::filesystem::path& path, std::string_view text) {
  const std::filesystem::path temporary = path.string() + ".tmp";
  std::error_code error;
  {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    file << text;
    file.flush();
    RAGGED_CHECK(
        file, "[run] Expected to write '{}', but couldn't. Is run.dir writable, is the disk full?", temporary.string());
  }
  std::filesystem::rename(temporary, path, error);
  RAGGED_CHECK(!error, "[run] Expected to write '{}', but got: {}.", path.string(), error.message());
}

Reporter::Reporter(bool is_main, std::filesystem::path dir, Index resumed_step)
    : is_main_(is_main), has_colour_(stdout_has_colour()), dir_(std::move(dir)) {
  if (!is_main_) return;
  std::error_code error;
  std::filesystem::create_directories(dir_, error);
  const std::filesystem::path path = dir_ / "metrics.jsonl";
  if (resumed_step > 0) {
    std::ostringstream before;
    before << std::ifstream(path, std::ios::binary).rdbuf();
    write_file(path, lines_up_to(before.str(), resumed_step));
  }
  jsonl_.open(path, resumed_step > 0 ? std::ios::app : std::ios::trunc);
  RAGGED_CHECK(!error && jsonl_, "[run] Expected a folder to write to, but '{}' isn't (key 'run.dir').", dir_.string());
}

void Reporter::say(std::string_view line) {
  if (!is_main_) return;
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

void Reporter::step(const StepMetrics& metrics, Index steps, bool on_console) {
  if (!is_main_) return;
  jsonl_ << to_json_line(metrics) << std::endl;  // flushed: a run that is killed leaves what it did
  if (!on_console) return;
  const std::string line = console_line(metrics, steps);
  say(has_colour_ && metrics.val_loss ? fmt::format("\x1b[1m{}\x1b[0m", line) : line);
}

void Reporter::finish(const RunSummary& summary) {
  if (!is_main_) return;
  say(bytes_table(summary.planned, summary.measured));
  write_file(dir_ / "summary.json", to_json(summary) + "\n");
}

}  // namespace ragged::train
