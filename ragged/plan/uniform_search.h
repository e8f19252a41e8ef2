// The search for the shard size of one uniform segment, in terms of plain extents: what
// plan_uniform and plan_uniform_paper share. Internal to the planner.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <vector>

#include "ragged/plan/planner.h"

namespace ragged::plan::detail {

/// One segment's search problem, with its arguments checked and the facts that every step asks for.
class UniformSearch {
 public:
  /// Throws InvalidArgument on bad sizes, blocks, world size, unit or alignment.
  UniformSearch(std::span<const Extent> tensors, int world_size, Index collective_unit, Index start_alignment);

  /// No shard size below this can hold the elements.
  Index smallest() const { return smallest_; }
  /// A shard size at which everything fits on the first rank.
  Index largest() const { return largest_; }

  /// The starts at this shard size, each tensor as early as is legal. Only tensors whose block
  /// divides `unit` may contain whole shards. None when they don't fit.
  std::optional<std::vector<Index>> place(Index shard_size, Index unit) const;
  /// Whether place() would find starts.
  bool fits(Index shard_size, Index unit) const;

  /// Smallest multiple of `unit` that is below `best` and fits; `best` when there is none.
  Index improve(Index best, Index unit) const;

 private:
  bool walk(Index shard_size, Index unit, std::vector<Index>* starts) const;

  std::span<const Extent> tensors_;
  Index world_size_;
  Index start_alignment_;
  Index smallest_ = 0;
  Index largest_ = 0;
};

/// Exact smallest shard size for the order of the search's tensors, if it is below `cutoff`, else
/// `cutoff`. Past a limit on the number of common multiples (see plan_uniform) the rest is skipped.
Index shard_size_below(
    const UniformSearch& search, std::span<const Extent> tensors, Index collective_unit, Index cutoff);

/// Size of a piece that must stay on one rank (a block, or the short rest of one) -> how many there
/// are.
using PieceCounts = std::map<Index, Index>;

/// Adds the blocks of one tensor. `restart` as in ParamSpec.
void add_pieces(PieceCounts& pieces, Index numel, Index block, Index restart);

/// shard_size_lower_bound() for pieces: blocks that restart aren't extents.
Index bound_for_pieces(const PieceCounts& pieces, int world_size, Index collective_unit);

}  // namespace ragged::plan::detail
