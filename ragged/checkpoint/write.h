// A rank's part of a checkpoint: which boxes it writes into which files, and writing them. Values come from a callback,
// a tensor at a time, so that nobody holds a second copy of more than one. No torch, no other ranks.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ragged/checkpoint/checksum.h"
#include "ragged/checkpoint/format.h"

namespace ragged::checkpoint {

/// What one rank writes of one tensor.
struct WritePiece {
  std::string name{};
  std::string dtype{};
  std::vector<Index> shape{};  // of the whole tensor
  layout::Interval owned{};    // flat, of `within`; empty: this rank writes nothing...
  /// ...unless the tensor has no elements at all: then one rank must say that it exists.
  bool announces_empty = false;
  std::optional<layout::Box> within{};  // a part of the tensor, as tensor parallelism leaves it; none: all of it
};

/// Bytes of a piece, row-major: owned.size() elements. Called once a piece, in order; the result must live until the
/// next call.
using FetchBytes = std::function<Bytes(std::size_t piece)>;
/// Told after each piece; for a person to watch.
using WriteProgress = std::function<void(Index bytes)>;

/// Writes this rank's safetensors files and its JSON into `folder`, synced, and returns the checksum of the latter.
/// Throws CheckpointError that names file and tensor.
std::uint64_t write_rank_files(
    const std::filesystem::path& folder, int rank, std::span<const WritePiece> pieces, const FetchBytes& fetch,
    const std::map<std::string, std::string>& texts = {}, Index chunk_bytes = kDefaultChunkBytes,
    const WriteProgress& progress = {});

/// Bytes that write_rank_files will write of tensors.
Index bytes_of(std::span<const WritePiece> pieces);

}  // namespace ragged::checkpoint
