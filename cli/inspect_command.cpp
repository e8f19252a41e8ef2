#include "inspect_command.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "open_checkpoint.h"
#include "output.h"
#include "ragged/base/text.h"
#include "ragged/checkpoint/read.h"

namespace ragged::cli {
namespace {

using checkpoint::Checkpoint;
using checkpoint::TensorInfo;

constexpr std::size_t kPlacementWidth = 60;  // thousands of ranks make long lines
constexpr std::size_t kFactWidth = 60;

bool is_state(const TensorInfo& info) {
  return info.name.starts_with("state.");
}

Index bytes_of(const TensorInfo& info) {
  return checked_product(info.shape) * checkpoint::dtype_bytes(info.dtype);
}

std::string shortened(std::string text, std::size_t width) {
  std::ranges::replace(text, '\n', ' ');
  if (text.size() > width) text = text.substr(0, width - 3) + "...";
  return text;
}

std::string tensor_table(const std::vector<TensorInfo>& tensors) {
  std::size_t name_width = 4;
  std::size_t shape_width = 5;
  std::size_t format_width = 6;
  for (const TensorInfo& info : tensors) {
    name_width = std::max(name_width, info.name.size());
    shape_width = std::max(shape_width, fmt::format("{}", fmt::join(info.shape, "x")).size());
    format_width = std::max(format_width, info.format.size());
  }
  std::string text = fmt::format(
      "{:<{}}  {:<5}  {:<{}}  {:<{}}  {:>14}  {}\n", "name", name_width, "dtype", "shape", shape_width, "format",
      format_width, "bytes", "placement");
  for (const TensorInfo& info : tensors) {
    text += fmt::format(
        "{:<{}}  {:<5}  {:<{}}  {:<{}}  {:>14}  {}\n", info.name, name_width, info.dtype,
        info.shape.empty() ? "scalar" : fmt::format("{}", fmt::join(info.shape, "x")), shape_width,
        info.format.empty() ? "-" : info.format, format_width, grouped(bytes_of(info)),
        shortened(info.placement, kPlacementWidth));
  }
  return text;
}

std::string totals(const std::vector<TensorInfo>& tensors) {
  Index counts[2] = {0, 0};
  Index elements[2] = {0, 0};
  Index bytes[2] = {0, 0};
  for (const TensorInfo& info : tensors) {
    const int kind = is_state(info) ? 1 : 0;
    ++counts[kind];
    elements[kind] += checked_product(info.shape);
    bytes[kind] += bytes_of(info);
  }
  return fmt::format(
      "parameters: {} tensors, {} elements, {} bytes\noptimizer states: {} tensors, {} elements, {} bytes\n", counts[0],
      grouped(elements[0]), grouped(bytes[0]), counts[1], grouped(elements[1]), grouped(bytes[1]));
}

std::string fact_list(const checkpoint::Facts& facts, bool in_full) {
  std::string text;
  const auto line = [&](const std::string& name, const std::string& value) {
    const bool is_block = in_full && value.find('\n') != std::string::npos;
    text += is_block ? fmt::format("  {}:\n{}\n", name, value)
                     : fmt::format("  {} = {}\n", name, in_full ? value : shortened(value, kFactWidth));
  };
  for (const auto& [name, value] : facts.integers) line(name, fmt::format("{}", value));
  for (const auto& [name, value] : facts.numbers) line(name, fmt::format("{}", value));
  for (const auto& [name, value] : facts.texts) line(name, value);
  return text.empty() ? text : "facts:\n" + text;
}

}  // namespace

void run_inspect(const InspectArguments& arguments) {
  const Checkpoint checkpoint = open_checkpoint(arguments.folder);
  const checkpoint::CheckpointIndex& index = checkpoint.index();
  std::size_t files = 0;
  for (const checkpoint::Manifest& manifest : checkpoint.manifests()) files += manifest.files.size();
  print(
      fmt::format(
          "{}: step {}, saved by {} rank{}, {} bytes in {} files\n\n", checkpoint.folder().string(), index.step,
          index.world_size, index.world_size == 1 ? "" : "s", grouped(checkpoint.bytes()), files) +
      tensor_table(index.tensors) + "\n" + totals(index.tensors) + fact_list(index.facts, arguments.facts));
  if (!arguments.verify) return;

  const auto start = std::chrono::steady_clock::now();
  Index bytes = 0;
  checkpoint::verify(checkpoint, [&](Index count) { bytes += count; });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  print(fmt::format(
      "\nverified: all {} bytes are as they were written ({:.0f} MB/s)\n", grouped(bytes),
      static_cast<double>(bytes) / 1e6 / std::max(seconds, 1e-9)));
}

}  // namespace ragged::cli
