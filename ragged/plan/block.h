// What a shard policy answers for one parameter: the block that must stay on one rank, and how it
// becomes elements. Pure arithmetic on shapes.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "ragged/base/math.h"

namespace ragged::plan {

/// The smallest piece of a parameter that must stay on one rank.
struct Block {
  enum class Kind { kElements, kRows, kWhole, kTile };
  Kind kind = Kind::kElements;
  Index count = 1;    // elements, rows, or a tile's rows
  Index columns = 0;  // of a tile

  friend bool operator==(const Block&, const Block&) = default;
};

/// n consecutive elements of the row-major storage.
Block elements(Index count);
/// n rows of the last two dims (a 1-D parameter's row is one element); in a stack of matrices (3-D
/// and more) blocks restart at each matrix, so none straddles two experts.
Block rows(Index count);
/// The whole tensor on one rank.
Block whole();
/// `rows` x `columns` tiles: the smallest contiguous block that cuts none is a strip of `rows`
/// rows.
Block tile(Index rows, Index columns);

std::string to_string(const Block& block);

/// A block in elements of a row-major tensor. `restart` > 0: blocks begin anew every `restart`
/// elements and the last of each run may be short; 0: they run over the whole tensor and only its
/// very last may be short.
struct BlockExtent {
  Index block = 1;
  Index restart = 0;
  friend bool operator==(const BlockExtent&, const BlockExtent&) = default;
};

/// Resolves a block for a tensor of this shape. Throws InvalidArgument, naming `param`, for a count
/// below 1, more elements or rows than the tensor (or one matrix of its stack) has, or a tile on a
/// parameter below 2-D. An empty tensor gives {1, 0}.
BlockExtent block_extent(const Block& block, std::span<const Index> shape, std::string_view param);

}  // namespace ragged::plan
