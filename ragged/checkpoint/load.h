// Filling sharded tensors from a checkpoint, whatever the ranks, mesh and blocks it was saved with. Each rank reads
// what it needs and nothing travels between ranks but their agreement.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ragged/checkpoint/state.h"
#include "ragged/comm/communicator.h"

namespace ragged::checkpoint {

struct LoadOptions {
  bool allow_unused = false;  // tensors in the checkpoint that nobody asks for
  /// Every byte is read and checked on all ranks before the first tensor changes, so that a damaged file leaves
  /// everything as it was. Without it bytes are checked as they come, which is one pass over the files less.
  bool verify_first = true;
  /// Looks at what isn't tensors before anything is changed; throws to refuse.
  std::function<void(const CheckpointIndex&)> check{};
};

struct LoadReport {
  Index step = 0;
  int world_size = 1;  // that saved it
  Facts facts{};
  std::map<std::string, std::string> rank_texts{};  // of the rank with our number; none at another world size
  Index wanted_bytes = 0;                           // of this rank's tensors
  Index read_bytes = 0;                             // in each pass
  double seconds = 0.0;
};

/// Overwrites the local tensors of `items`. The caller bumps their versions (Unit::mark_parameters_changed).
/// Collective. Throws the same on all ranks: CheckpointError for what is missing, damaged or doesn't fit, before
/// anything is changed; InvalidArgument for items that can't be.
LoadReport load(
    const comm::Communicator& all, const std::filesystem::path& folder, const std::vector<Item>& items,
    const LoadOptions& options = {});

/// The same into parts.
LoadReport load(
    const comm::Communicator& all, const std::filesystem::path& folder, const std::vector<Part>& parts,
    const LoadOptions& options = {});

/// What to resume from, decided by rank 0: "auto" is the newest complete checkpoint below `root`, if there is one; a
/// path is a step's folder, or a folder of steps, of which the newest complete one is taken. `skipped` gets, on rank 0,
/// a line for each damaged one that was passed over. Collective. Throws CheckpointError for a path without checkpoints.
std::optional<std::filesystem::path> find_checkpoint(
    const comm::Communicator& all, const std::string& wanted, const std::filesystem::path& root,
    std::vector<std::string>* skipped = nullptr);

}  // namespace ragged::checkpoint
