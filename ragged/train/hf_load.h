// Starting from a Hugging Face model: each rank fills its shards from the files, and nobody holds the whole model.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "ragged/buffer/sharded_tensor.h"
#include "ragged/comm/communicator.h"
#include "ragged/train/config.h"

namespace ragged::train {

/// Overwrites the local tensors of `parameters`, which are those of a model made of `config`, with the weights in
/// config.from; the caller bumps their versions. Returns a line for people. Collective. Throws the same on all ranks,
/// before anything is changed unless a file can't be read then: what HfWeights::open throws, and InvalidArgument where
/// the folder's config.json and `config` differ.
std::string load_hf_weights(
    const comm::Communicator& all, const ModelConfig& config, const std::vector<buffer::ShardedTensor>& parameters);

}  // namespace ragged::train
