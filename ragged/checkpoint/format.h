// What a checkpoint folder holds, as values, and its JSON. Not the tensors' bytes (safetensors_file.h), not where
// folders lie and how they appear (publish.h).
//
// [Note: checkpoint folder]
//     checkpoint.json                                  what is saved: names, shapes, dtypes, and the run's facts
//     shard-00001.json                                 a rank's files: which box of which tensor lies where
//     shard-00001-model-00001-of-00002.safetensors     the boxes
// The safetensors files are torch's own layout: a file holds at most one box of a tensor and says in DCP_SHARDING_INFO
// where in the full tensor it lies, so that torch.distributed.checkpoint loads a folder with HuggingFaceStorageReader
// and knows nothing of us. A rank's interval of a tensor is up to 2n-1 boxes, hence several files a rank. Optimizer
// states are tensors like others, named as torch flattens them: "state.<parameter>.<state>".
// Everything has a checksum: headers and values by chunks in the rank's JSON, that file's in checkpoint.json, and both
// JSON files their own in their first bytes. Only tensors are in binary; nothing is pickled.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ragged/layout/box.h"

namespace ragged::checkpoint {

inline constexpr int kFormatVersion = 1;
inline constexpr const char* kIndexFile = "checkpoint.json";
inline constexpr Index kDefaultChunkBytes = Index{1} << 20;

/// Values of the run beside its tensors: what a continued run needs, under dotted names of the caller's choice. Equal
/// on all ranks.
struct Facts {
  std::map<std::string, std::string> texts{};      // UTF-8
  std::map<std::string, std::int64_t> integers{};  // steps, seeds
  std::map<std::string, double> numbers{};         // finite; read back to the same bits

  friend bool operator==(const Facts&, const Facts&) = default;
};

/// A saved tensor as a whole.
struct TensorInfo {
  std::string name{};
  std::string dtype{};  // safetensors' name: "BF16"
  std::vector<Index> shape{};
  std::string format{};     // what the numbers mean where they are codes: "power 32x32"; empty: they are what they are
  std::string placement{};  // for people

  friend bool operator==(const TensorInfo&, const TensorInfo&) = default;
};

/// A box of a tensor in a file.
struct StoredPiece {
  std::string tensor{};
  layout::Box box{};
  Index begin = 0;  // bytes from the start of the file
  /// Of each chunk_bytes of the box, the last chunk being shorter.
  std::vector<std::uint64_t> checksums{};

  friend bool operator==(const StoredPiece&, const StoredPiece&) = default;
};

struct StoredFile {
  std::string name{};
  Index bytes = 0;
  Index header_bytes = 0;  // its length included
  std::uint64_t header_checksum = 0;
  std::vector<StoredPiece> pieces{};

  friend bool operator==(const StoredFile&, const StoredFile&) = default;
};

/// What one rank wrote.
struct Manifest {
  std::vector<StoredFile> files{};
  std::map<std::string, std::string> texts{};  // of this rank alone, such as the state of a generator

  friend bool operator==(const Manifest&, const Manifest&) = default;
};

/// checkpoint.json.
struct CheckpointIndex {
  Index step = 0;
  int world_size = 1;  // ranks that wrote
  Index chunk_bytes = kDefaultChunkBytes;
  std::vector<TensorInfo> tensors{};
  std::vector<std::uint64_t> manifest_checksums{};  // of each rank's file as a whole
  Facts facts{};

  friend bool operator==(const CheckpointIndex&, const CheckpointIndex&) = default;
};

/// "shard-00002.json" for rank 1.
std::string manifest_name(int rank);
/// "shard-00002-model-00001-of-00003.safetensors" for the first of three files of rank 1.
std::string shard_name(int rank, int part, int parts);

/// Bytes of an element; throws InvalidArgument for a dtype that isn't of whole bytes.
Index dtype_bytes(std::string_view dtype);

/// Throw InvalidArgument for text that isn't UTF-8 and numbers that aren't finite.
std::string to_json(const CheckpointIndex& index);
std::string to_json(const Manifest& manifest);

/// Throw CheckpointError, naming `source`, for damage of any kind: the text's own checksum comes first, and then
/// nothing is believed that isn't checked.
CheckpointIndex index_from_json(std::string_view text, std::string_view source);
/// `index` says which tensors there are, and `rank` how the files are called.
Manifest manifest_from_json(std::string_view text, const CheckpointIndex& index, int rank, std::string_view source);

}  // namespace ragged::checkpoint
