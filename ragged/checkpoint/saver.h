// Saving: each rank writes its own boxes, rank 0 publishes when all have.
//
// [Note: saving]
//     start    rank 0 makes the temporary folder; each rank writes its files there, or copies its tensors once and lets
//              a thread write them (async)
//     finish   all have written: the checksums of the ranks' JSON files come together, rank 0 writes checkpoint.json
//     and
//              renames (publish.h)
// No tensor travels. The writing thread issues no collective: it would come between those of training. So publishing
// waits for a call of finish() by all ranks; the trainer asks is_written() in the all-reduce that it has anyway.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "ragged/checkpoint/publish.h"
#include "ragged/checkpoint/state.h"
#include "ragged/comm/communicator.h"

namespace ragged::checkpoint {

/// How far this rank's writing is.
struct SaveProgress {
  Index written_bytes = 0;
  Index total_bytes = 0;
  double seconds = 0.0;  // since start()
};

struct SaverOptions {
  Index keep = 2;  // checkpoints that stay; 0: all
  bool async = false;
  /// Longest time that writing may take: the files of one rank, from start() on.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  Index chunk_bytes = kDefaultChunkBytes;
  /// Called after each tensor by the thread that writes.
  std::function<void(const SaveProgress&)> on_progress{};
};

struct SaveReport {
  Index step = 0;
  std::filesystem::path folder{};
  Index bytes = 0;             // of tensors, all ranks together
  double seconds = 0.0;        // from start() until it was published
  double blocked_seconds = 0;  // that the caller waited in start() and finish()
};

/// One a run. Calls come in the same order on all ranks, from one thread.
class Saver {
 public:
  /// Rank 0 sweeps away what killed runs left below `root`.
  Saver(comm::Communicator all, std::filesystem::path root, SaverOptions options = {});
  /// Waits for the writing thread; what wasn't finished isn't published.
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  const CheckpointFolders& folders() const { return folders_; }
  /// For what begins from now on.
  void set_options(SaverOptions options) { options_ = std::move(options); }

  /// Begins a checkpoint; first finishes the one before (back-pressure), whose report it returns. Synchronous: returns
  /// when this rank's files are on the disk. Asynchronous: when its tensors are copied. Collective. Throws
  /// InvalidArgument for a state that can't be saved and CheckpointError where the folder can't be made, alike on all
  /// ranks, or for lists and facts that differ between ranks; what goes wrong in writing is reported by finish().
  std::optional<SaveReport> start(Index step, const State& state);
  std::optional<SaveReport> start(Index step, const RankState& state);
  /// Begun, and not finished yet.
  bool is_busy() const { return job_ != nullptr; }
  /// This rank has nothing left to write (or failed to): finish() won't wait for it.
  bool is_written() const;
  /// Waits until all ranks have written, then publishes. Collective. Throws CheckpointError, the same on all ranks, for
  /// what went wrong on any of them, or past the time-out; the checkpoints before are untouched then.
  SaveReport finish();
  /// Both.
  SaveReport save(Index step, const State& state);

  SaveProgress progress() const;

 private:
  struct Job;
  std::optional<SaveReport> begin(Index step, const std::function<RankState()>& state);
  void wait_for_writers();
  void publish(SaveReport& report);
  void fail();

  comm::Communicator all_;
  CheckpointFolders folders_;
  SaverOptions options_;
  std::shared_ptr<Job> job_;
};

}  // namespace ragged::checkpoint
