#include "ragged/checkpoint/load.h"

#include <chrono>
#include <cstring>

#include <ATen/ATen.h>

#include "ragged/checkpoint/agree.h"
#include "ragged/checkpoint/check.h"
#include "ragged/checkpoint/publish.h"

namespace ragged::checkpoint {
namespace {

namespace fs = std::filesystem;

void store(const at::Tensor& local, Index offset_bytes, Bytes bytes) {
  if (local.is_cpu()) {
    std::memcpy(static_cast<std::byte*>(local.mutable_data_ptr()) + offset_bytes, bytes.data(), bytes.size());
    return;
  }
  const auto count = static_cast<Index>(bytes.size());
  const at::Tensor source = at::empty({count}, at::kByte);
  std::memcpy(source.mutable_data_ptr(), bytes.data(), bytes.size());
  local.view(at::kByte).narrow(0, offset_bytes, count).copy_(source);
}

LoadReport load_into(
    const comm::Communicator& all, const fs::path& folder, const std::function<std::vector<Part>()>& make_parts,
    const LoadOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const at::NoGradGuard no_grad;
  std::vector<Part> parts;
  std::optional<Checkpoint> checkpoint;
  std::optional<ReadPlan> plan;
  agree(all, [&] {
    parts = make_parts();
    check_parts(parts);
    checkpoint = Checkpoint::open(folder);
    if (options.check) options.check(checkpoint->index());
    plan.emplace(*checkpoint, read_pieces(parts), options.allow_unused);
    if (options.verify_first) plan->verify();
  });
  agree(all, [&] {
    plan->read(
        [&](std::size_t piece, Index offset, Bytes bytes) { store(parts[piece].local.detach(), offset, bytes); });
  });

  LoadReport report{.step = checkpoint->index().step, .world_size = checkpoint->index().world_size};
  report.facts = checkpoint->index().facts;
  if (report.world_size == all.size()) {
    report.rank_texts = checkpoint->manifests()[static_cast<std::size_t>(all.rank())].texts;
  }
  report.wanted_bytes = plan->wanted_bytes();
  report.read_bytes = plan->read_bytes();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace

LoadReport load(
    const comm::Communicator& all, const fs::path& folder, const std::vector<Item>& items, const LoadOptions& options) {
  return load_into(
      all, folder, [&] { return parts_of(items, all.rank()); }, options);
}

LoadReport load(
    const comm::Communicator& all, const fs::path& folder, const std::vector<Part>& parts, const LoadOptions& options) {
  return load_into(
      all, folder, [&] { return parts; }, options);
}

std::optional<fs::path> find_checkpoint(
    const comm::Communicator& all, const std::string& wanted, const fs::path& root, std::vector<std::string>* skipped) {
  std::string found;
  agree(all, [&] {
    if (all.rank() != 0) return;
    const bool is_auto = wanted == "auto";
    std::error_code error;
    if (!is_auto && fs::exists(fs::path(wanted) / kIndexFile, error)) {
      found = wanted;
      return;
    }
    if (is_auto) CheckpointFolders(root).sweep();  // a run that was killed may have taken a step's name away
    const auto newest = CheckpointFolders(is_auto ? root : fs::path(wanted)).newest_complete(skipped);
    if (newest) found = newest->string();
    RAGGED_CHECKPOINT_CHECK(
        is_auto || newest,
        "[load] Expected a checkpoint folder, or a folder with some, but '{}' is none (key 'checkpoint.resume'). "
        "\"auto\" "
        "takes the newest of this run.",
        wanted);
  });
  found = broadcast_text(all, found, 0);
  return found.empty() ? std::nullopt : std::optional<fs::path>(found);
}

}  // namespace ragged::checkpoint
