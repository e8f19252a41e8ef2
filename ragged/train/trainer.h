// The training loop of `ragged train`: a sharded Llama on text. Reads top to bottom; what it calls is in the files
// beside it.
#pragma once

#include "ragged/comm/rank_env.h"
#include "ragged/comm/world.h"
#include "ragged/train/config.h"
#include "ragged/train/data.h"
#include "ragged/train/metrics.h"

namespace ragged::train {

/// Trains to the end on this rank and writes metrics.jsonl, config.toml and summary.json to run.dir (rank 0).
/// Collective. Throws InvalidArgument for what a config or the environment gets wrong, CommError for a lost peer, Error
/// when the loss isn't finite.
RunSummary train(const Config& config, const comm::RankEnv& env);

/// The same over ranks that are connected already, and text that is read already.
RunSummary train(const Config& config, comm::World& world, const TextData& data);

}  // namespace ragged::train
