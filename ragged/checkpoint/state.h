// What goes into a checkpoint and what is filled from one: sharded tensors under the names that they have in the files,
// and the facts beside them. Also how a sharded tensor is seen by the part of this layer that knows no torch.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "ragged/buffer/sharded_tensor.h"
#include "ragged/checkpoint/format.h"
#include "ragged/checkpoint/read.h"
#include "ragged/checkpoint/write.h"

namespace ragged::checkpoint {

/// A sharded tensor and what it is called in a checkpoint.
struct Item {
  buffer::ShardedTensor tensor{};
  std::string name{};    // in the files
  std::string format{};  // see TensorInfo::format
};

/// From our name to the one in the files: another project's names go here.
using NameMap = std::function<std::string(const std::string& name)>;
/// Parameters, under their own names unless `names` says otherwise.
std::vector<Item> model_items(const std::vector<buffer::ShardedTensor>& parameters, const NameMap& names = {});
/// Optimizer states "<parameter>.<state>", named "state.<parameter>.<state>" as torch flattens them. `formats` holds
/// the state format by parameter; plain numbers ("fp32", "bf16") need none, since their dtype says it all.
std::vector<Item> optimizer_items(
    const std::vector<buffer::ShardedTensor>& states, const std::map<std::string, std::string>& formats = {});

/// Equal lists on all ranks, but for what each owns.
struct State {
  std::vector<Item> tensors{};
  Facts facts{};
  std::map<std::string, std::string> rank_texts{};  // this rank's own
};

/// "BF16"; throws InvalidArgument for a type that safetensors doesn't have.
std::string stored_dtype(at::ScalarType type);

/// Throws InvalidArgument for two tensors of one name, placements that checkpoints don't know (they take RaggedShard,
/// Shard(0) and Replicate), or a local tensor that isn't 1-D, contiguous, and as long as what the rank owns.
void check_items(const std::vector<Item>& items);
std::vector<TensorInfo> infos_of(const std::vector<Item>& items);
/// What `rank` (global) writes: the first replica writes, the others nothing.
std::vector<WritePiece> write_pieces(const std::vector<Item>& items, int rank);
std::vector<ReadPiece> read_pieces(const std::vector<Item>& items);

}  // namespace ragged::checkpoint
