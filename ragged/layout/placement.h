// How one tensor lies on one mesh dim, as values. RaggedShard is the paper's placement
// (veScale-FSDP, section 4; arXiv 2602.22437): its atom is any contiguous block and a rank may hold
// any number of atoms, zero included. Index arithmetic only: no tensors, no communication.
#pragma once

#include <span>
#include <string>
#include <variant>
#include <vector>

#include "ragged/layout/interval.h"

namespace ragged::layout {

struct Replicate {
  friend bool operator==(const Replicate&, const Replicate&) = default;
};

/// Even split of one dim as torch.chunk does it: ceil-sized pieces, trailing ranks short or empty.
struct Shard {
  int dim = 0;
  friend bool operator==(const Shard&, const Shard&) = default;
};

enum class ReduceOp { kSum, kAvg, kMax };

struct Partial {
  ReduceOp op = ReduceOp::kSum;
  friend bool operator==(const Partial&, const Partial&) = default;
};

/// Cuts the row-major storage of a tensor into consecutive flat intervals, one a rank.
/// `dims` leading dims form the cells: with shape s, P = prod(s[:dims]) and X = prod(s[dims:]),
/// rank r owns
/// [(P/U) * X * sum(units[:r]), (P/U) * X * sum(units[:r+1])), U = sum(units). U must divide P.
/// All-zero units are the layout of an empty tensor. dims == 0 needs one-hot units: one rank owns
/// everything. Example: shape (5, 4), dims 1, units (2, 3): rank 0 owns [0, 8), rank 1 owns [8,
/// 20). Units are divided by their gcd on construction, so equal layouts compare and hash equal.
class RaggedShard {
 public:
  /// Throws InvalidArgument on negative dims, no ranks, a negative unit, or dims == 0 without
  /// one-hot units.
  RaggedShard(int dims, std::vector<Index> local_units);

  int dims() const { return dims_; }
  const std::vector<Index>& local_units() const { return local_units_; }
  int world_size() const { return static_cast<int>(local_units_.size()); }

  friend bool operator==(const RaggedShard&, const RaggedShard&) = default;

 private:
  int dims_;
  std::vector<Index> local_units_;
};

/// RaggedShard over what Shard(0) on a mesh dim of size `split_factor` (TP or EP) left on a rank:
/// records the permutation needed to rebuild the full tensor.
class StridedRaggedShard {
 public:
  StridedRaggedShard(int dims, std::vector<Index> local_units, int split_factor);

  const RaggedShard& ragged() const { return ragged_; }
  int split_factor() const { return split_factor_; }

  friend bool operator==(const StridedRaggedShard&, const StridedRaggedShard&) = default;

 private:
  RaggedShard ragged_;
  int split_factor_;
};

using Placement = std::variant<Replicate, Shard, Partial, RaggedShard, StridedRaggedShard>;

/// For example "RaggedShard(dims=1, units=[2, 3])".
std::string to_string(const Placement& placement);
std::size_t hash_value(const Placement& placement);

/// Rank r's flat interval of a tensor of this shape. Throws InvalidArgument when `placement`
/// doesn't fit `shape` (more dims than the tensor has; the unit sum doesn't divide the prefix
/// cells) or rank is out of range.
Interval ragged_interval(std::span<const Index> shape, const RaggedShard& placement, int rank);

/// The placement that gives rank r the r-th of these intervals of a tensor of this shape. The
/// intervals must be ascending, adjacent and cover the tensor (empty ones may lie anywhere). dims
/// is the shortest prefix whose row size divides every cut: 0 when one rank owns everything. An
/// empty tensor gives dims 1 and all-zero units.
RaggedShard ragged_from_intervals(std::span<const Index> shape, std::span<const Interval> by_rank);

/// What Shard(dim) over `world_size` ranks leaves on `rank`: sizes, and the offset along `dim`.
struct LocalShard {
  std::vector<Index> shape{};
  Index offset = 0;
};
LocalShard shard_local(std::span<const Index> shape, int dim, int world_size, int rank);

/// Block for a ragged placement that composes with a foreign Shard(dim): with dim > 0 the block is
/// raised to a whole traversal of that dim of the local tensor, lcm(block, local_size[dim] *
/// local_stride[dim]) or at most the whole tensor, so that no cut goes through it; with dim == 0 it
/// stays.
Index raise_block_for_shard(std::span<const Index> local_shape, Index block, int dim);

}  // namespace ragged::layout
