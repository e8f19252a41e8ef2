// Where checkpoints of a run lie and how they appear: whole or not at all. One process (rank 0) calls what writes;
// who waits for whom is decided in saver.h.
//
// [Note: publishing]
//     checkpoints/step-200/     a checkpoint; has this name from the moment it is complete and on the disk
//     checkpoints/latest        the name of the one published last
//     checkpoints/.tmp-...      half written, or half removed; swept away when the next run begins
// A step folder appears by one rename, after its files, its own names and its parent are synced. `latest` is replaced
// by a rename too, afterwards: at worst it names the checkpoint before. A folder that is to go loses its name first, so
// what is called step-N is never half removed. A step that is saved again takes the place of the old one in one
// exchange.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "ragged/base/math.h"

namespace ragged::checkpoint {

inline constexpr const char* kLatestFile = "latest";

class CheckpointFolders {
 public:
  /// Touches nothing.
  explicit CheckpointFolders(std::filesystem::path root);

  const std::filesystem::path& root() const { return root_; }
  std::filesystem::path folder(Index step) const;     // "<root>/step-200"
  std::filesystem::path temporary(Index step) const;  // where it is written

  /// Makes the root, and an empty temporary folder for this step. Throws CheckpointError where it can't.
  void begin(Index step) const;
  /// The temporary folder, complete and with its files synced, becomes the step's folder, then `latest` names it, then
  /// all but the `keep` newest steps up to this one go (0: all stay). Throws CheckpointError; the step is published
  /// once its folder has its name, whatever comes after.
  void publish(Index step, Index keep) const;
  /// Drops a temporary folder after a failure. Never throws.
  void abandon(Index step) const noexcept;
  /// Drops what runs that were killed left half done, and gives a folder its name back that lost it midway. Never
  /// throws.
  void sweep() const noexcept;

  /// Steps that have a folder, ascending. None where the root doesn't exist.
  std::vector<Index> steps() const;
  /// The checkpoint to resume from: the one that `latest` names, or else the newest, that opens without an error.
  /// `skipped` gets a line for each that doesn't.
  std::optional<std::filesystem::path> newest_complete(std::vector<std::string>* skipped = nullptr) const;

 private:
  void take_name(Index step) const;
  void point_latest(Index step) const;
  void drop(Index step) const;

  std::filesystem::path root_;
};

}  // namespace ragged::checkpoint
