// What goes into a checkpoint and what is filled from one: sharded tensors under the names that they have in the files,
// and the facts beside them. Also how a sharded tensor is seen by the part of this layer that knows no torch.
#pragma once

#include <functional>
#include <map>
#include <optional>
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

/// A rank's part of a tensor, once it is decided who writes what. Items become parts; a front that has tensors of its
/// own kinds makes them itself.
struct Part {
  TensorInfo info{};                    // alike on all ranks, but for the placement
  at::Tensor local{};                   // 1-D, contiguous: the row-major elements of `owned`
  layout::Interval owned{};             // flat, of `within`
  std::optional<layout::Box> within{};  // a part of the tensor; none: all of it
  bool writes = true;                   // on one of the ranks that hold the same elements
  bool announces_empty = false;         // says that a tensor without elements exists: on one rank
};

/// What a rank saves. Texts and integers of the facts are equal on all ranks; of numbers, which may be measured, rank
/// 0's are saved.
struct RankState {
  std::vector<Part> parts{};
  Facts facts{};
  std::map<std::string, std::string> rank_texts{};  // this rank's own
};

/// Equal lists on all ranks, but for what each owns.
struct State {
  std::vector<Item> tensors{};
  Facts facts{};
  std::map<std::string, std::string> rank_texts{};  // this rank's own
};

/// "BF16"; throws InvalidArgument for a type that safetensors doesn't have.
std::string stored_dtype(at::ScalarType type);

/// Throws InvalidArgument for placements that checkpoints don't know (they take RaggedShard, Shard(0) and Replicate),
/// or a local tensor of another dtype.
void check_items(const std::vector<Item>& items);
/// What `rank` (global) holds and writes: the first replica writes, the others nothing. Checks the items.
std::vector<Part> parts_of(const std::vector<Item>& items, int rank);

/// Throws InvalidArgument for two parts of one name, or a local tensor that isn't as Part says.
void check_parts(const std::vector<Part>& parts);
std::vector<TensorInfo> infos_of(const std::vector<Part>& parts);
std::vector<WritePiece> write_pieces(const std::vector<Part>& parts);
std::vector<ReadPiece> read_pieces(const std::vector<Part>& parts);

}  // namespace ragged::checkpoint
