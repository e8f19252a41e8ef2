// The training loop of `ragged train`: a sharded language model on text. Reads top to bottom; what it calls is in the
// files beside it.
#pragma once

#include <functional>

#include "ragged/comm/rank_env.h"
#include "ragged/comm/world.h"
#include "ragged/train/config.h"
#include "ragged/train/data.h"
#include "ragged/train/metrics.h"

namespace ragged::train {

/// Asked once a step: the number of the signal that asks for a stop, or 0. Where it answers on one rank, all save a
/// checkpoint (if checkpoint.every is set) and stop after that step.
using StopRequest = std::function<int()>;

/// Trains to the end on this rank and writes metrics.jsonl, config.toml and summary.json to run.dir (rank 0), and
/// checkpoints to run.dir/checkpoints. A run that stops early writes no summary; its metrics go on where it is resumed.
/// Collective. Throws InvalidArgument for what a config or the environment gets wrong, CommError for a lost peer,
/// CheckpointError for one that can't be written or doesn't fit, Error when the loss isn't finite.
RunSummary train(const Config& config, const comm::RankEnv& env, const StopRequest& stop = {});

/// The same over ranks that are connected already, and text that is read already.
RunSummary train(const Config& config, comm::World& world, const TextData& data, const StopRequest& stop = {});

}  // namespace ragged::train
