#include "export_command.h"

#include <chrono>

#include <fmt/format.h>

#include "open_checkpoint.h"
#include "output.h"
#include "ragged/base/text.h"
#include "ragged/sim/text.h"
#include "ragged/train/hf_export.h"

namespace ragged::cli {

void run_export(const ExportArguments& arguments) {
  RAGGED_CHECK(
      arguments.to == "safetensors", "[export] Expected safetensors, but got '{}' (option --to).", arguments.to);
  train::HfExportOptions options;
  options.dtype = arguments.dtype;
  options.tokenizer = arguments.tokenizer;
  options.files.max_file_bytes = static_cast<Index>(sim::parse_bytes(arguments.max_file_size, "--max-file-size"));
  const auto start = std::chrono::steady_clock::now();
  const checkpoint::Checkpoint checkpoint = open_checkpoint(arguments.checkpoint);
  const train::HfExportReport report = train::export_to_hf(checkpoint, arguments.out, options);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  print(fmt::format(
      "{}: step {} as {}: {} tensors, {} bytes of {} in {} file{} ({:.2f} s)\n", arguments.out, checkpoint.index().step,
      report.architecture, report.tensors, grouped(report.bytes), report.dtype, report.files.size(),
      report.files.size() == 1 ? "" : "s", seconds));
}

}  // namespace ragged::cli
