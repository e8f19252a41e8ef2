// Checkpoints of a training run: what goes into one beside the tensors, when one is due, and what is left to say about
// it. How they are written is ragged/checkpoint's business.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ragged/checkpoint/load.h"
#include "ragged/checkpoint/saver.h"
#include "ragged/comm/world.h"
#include "ragged/fsdp/unit.h"
#include "ragged/optim/optimizer.h"
#include "ragged/train/config.h"

namespace ragged::train {

/// Of the run so far, beside step and tensors.
struct RunProgress {
  Index step = 0;  // taken
  double initial_val_loss = 0.0;
  double seconds = 0.0;
  Index skipped = 0;  // see StepMetrics::skipped
};

struct Resumed {
  RunProgress progress{};
  std::vector<std::string> notes{};  // lines for people: where from, and what differs
};

/// What ranks tell each other in the all-reduce of the loss; sums over ranks afterwards.
struct StepFlags {
  double stop = 0.0;     // asked to stop
  double written = 0.0;  // nothing left to write
};

/// One a run. All methods but flags() are collective.
class RunCheckpoints {
 public:
  /// `text_fingerprint`: of the training data, see TextData.
  RunCheckpoints(
      const Config& config, const comm::World& world, std::shared_ptr<fsdp::Unit> root, optim::Optimizer& optimizer,
      std::uint64_t text_fingerprint);

  /// Loads what checkpoint.resume asks for into model and optimizer; none where "auto" finds nothing. Throws
  /// CheckpointError, alike on all ranks and before anything is changed.
  std::optional<Resumed> resume();

  bool saves() const { return saver_ != nullptr; }
  /// This rank's, for a step; `stop` is whether it was asked to.
  StepFlags flags(bool stop) const;
  /// After a step: publishes what is written on all ranks, and saves where one is due: on the interval, after the last
  /// step, and before a stop. Returns lines for people.
  std::vector<std::string> after_step(const RunProgress& progress, const StepFlags& sums);

 private:
  std::vector<checkpoint::Item> items() const;
  checkpoint::State state(const RunProgress& progress) const;

  const Config& config_;
  const comm::World& world_;
  std::shared_ptr<fsdp::Unit> root_;
  optim::Optimizer& optimizer_;
  std::uint64_t text_fingerprint_;
  std::filesystem::path folder_;
  std::unique_ptr<checkpoint::Saver> saver_;
};

/// Keys whose values differ between two texts of to_toml(), as "train.lr: 0.003 -> 0.001"; those of checkpoint and run
/// aside.
std::vector<std::string> config_changes(std::string_view before, std::string_view now);

}  // namespace ragged::train
