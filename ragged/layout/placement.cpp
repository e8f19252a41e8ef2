#include "ragged/layout/placement.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace ragged::layout {
namespace {

std::vector<Index> checked_units(int dims, std::vector<Index> units) {
  RAGGED_CHECK(dims >= 0, "[RaggedShard] Expected dims >= 0, but got {}.", dims);
  RAGGED_CHECK(!units.empty(), "[RaggedShard] Expected one local unit a rank, but got none.");
  Index sum = 0;
  Index divisor = 0;
  std::size_t num_owners = 0;
  for (std::size_t rank = 0; rank < units.size(); ++rank) {
    const Index unit = units[rank];
    RAGGED_CHECK(
        unit >= 0, "[RaggedShard] Expected local units >= 0, but got {} (rank {} of {}).", unit, rank, units.size());
    RAGGED_CHECK(
        unit <= std::numeric_limits<Index>::max() - sum,
        "[RaggedShard] Expected local units with a sum below 2^63, but got more.");
    sum += unit;
    divisor = std::gcd(divisor, unit);
    num_owners += unit > 0 ? 1 : 0;
  }
  RAGGED_CHECK(
      dims > 0 || num_owners == 1,
      "[RaggedShard] Expected exactly one non-zero unit with dims=0, but got [{}]. Give dims > 0 "
      "to share a tensor between ranks.",
      fmt::join(units, ", "));
  if (divisor > 1) {
    for (Index& unit : units) unit /= divisor;
  }
  return units;
}

std::string_view name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kMax:
      return "max";
  }
  return "unknown";
}

// Elements of the part of the shape from `dim` on: one row of the cells that the first `dim` dims
// form.
Index row_size(std::span<const Index> shape, std::size_t dim) {
  return checked_product(shape.subspan(dim));
}

class Hasher {
 public:
  void add(Index value) {
    // The boost recipe: cheap, and good enough for a hash table.
    state_ ^= std::hash<Index>{}(value) + 0x9e3779b97f4a7c15ULL + (state_ << 6) + (state_ >> 2);
  }
  void add(const RaggedShard& placement) {
    add(placement.dims());
    for (Index unit : placement.local_units()) add(unit);
  }
  std::size_t value() const { return state_; }

 private:
  std::size_t state_ = 0;
};

template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};

}  // namespace

RaggedShard::RaggedShard(int dims, std::vector<Index> local_units)
    : dims_(dims), local_units_(checked_units(dims, std::move(local_units))) {}

StridedRaggedShard::StridedRaggedShard(int dims, std::vector<Index> local_units, int split_factor)
    : ragged_(dims, std::move(local_units)), split_factor_(split_factor) {
  RAGGED_CHECK(
      split_factor >= 1, "[StridedRaggedShard] Expected a split factor of at least 1, but got {}.", split_factor);
}

std::string to_string(const Placement& placement) {
  return std::visit(
      Overloaded{
          [](const Replicate&) { return std::string("Replicate()"); },
          [](const Shard& p) { return fmt::format("Shard(dim={})", p.dim); },
          [](const Partial& p) { return fmt::format("Partial({})", name(p.op)); },
          [](const RaggedShard& p) {
            return fmt::format("RaggedShard(dims={}, units=[{}])", p.dims(), fmt::join(p.local_units(), ", "));
          },
          [](const StridedRaggedShard& p) {
            return fmt::format(
                "StridedRaggedShard(dims={}, units=[{}], split_factor={})", p.ragged().dims(),
                fmt::join(p.ragged().local_units(), ", "), p.split_factor());
          }},
      placement);
}

std::size_t hash_value(const Placement& placement) {
  Hasher hasher;
  hasher.add(static_cast<Index>(placement.index()));
  std::visit(
      Overloaded{
          [](const Replicate&) {}, [&](const Shard& p) { hasher.add(p.dim); },
          [&](const Partial& p) { hasher.add(static_cast<Index>(p.op)); }, [&](const RaggedShard& p) { hasher.add(p); },
          [&](const StridedRaggedShard& p) {
            hasher.add(p.ragged());
            hasher.add(p.split_factor());
          }},
      placement);
  return hasher.value();
}

Interval ragged_interval(std::span<const Index> shape, const RaggedShard& placement, int rank) {
  RAGGED_CHECK(
      rank >= 0 && rank < placement.world_size(), "[ragged_interval] Expected a rank in [0, {}), but got {}.",
      placement.world_size(), rank);
  RAGGED_CHECK(
      placement.dims() <= static_cast<int>(shape.size()),
      "[ragged_interval] Expected at most {} dims for the shape [{}], but got dims={}.", shape.size(),
      fmt::join(shape, ", "), placement.dims());
  const Index numel = checked_product(shape);
  const std::vector<Index>& units = placement.local_units();
  const Index total = std::accumulate(units.begin(), units.end(), Index{0});
  if (total == 0) {
    RAGGED_CHECK(
        numel == 0,
        "[ragged_interval] Expected some non-zero unit for the {} elements of the shape [{}], but "
        "all are zero.",
        numel, fmt::join(shape, ", "));
    return {};
  }
  const std::size_t dims = static_cast<std::size_t>(placement.dims());
  const Index cells = checked_product(shape.first(dims));
  RAGGED_CHECK(
      cells % total == 0,
      "[ragged_interval] Expected local units whose sum divides the {} cells of the first {} dims "
      "of the shape [{}], but their sum is {}.",
      cells, dims, fmt::join(shape, ", "), total);
  if (numel == 0) return {};
  const Index unit_size = cells / total * row_size(shape, dims);
  const auto own = units.begin() + rank;
  const Index before = std::accumulate(units.begin(), own, Index{0});
  return {unit_size * before, unit_size * (before + *own)};
}

RaggedShard ragged_from_intervals(std::span<const Index> shape, std::span<const Interval> by_rank) {
  const Index numel = checked_product(shape);
  Index cursor = 0;
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (by_rank[rank].empty()) continue;
    RAGGED_CHECK(
        by_rank[rank].begin == cursor,
        "[ragged_from_intervals] Expected ascending, adjacent intervals, but got [{}, {}) where {} "
        "was due (rank {} of {}).",
        by_rank[rank].begin, by_rank[rank].end, cursor, rank, by_rank.size());
    cursor = by_rank[rank].end;
  }
  RAGGED_CHECK(
      cursor == numel,
      "[ragged_from_intervals] Expected intervals that cover the {} elements of the shape [{}], "
      "but they end at {}.",
      numel, fmt::join(shape, ", "), cursor);
  std::vector<Index> units(by_rank.size(), 0);
  if (numel == 0) return RaggedShard(1, std::move(units));

  const auto cuts_rows = [&](Index row) {
    return std::any_of(by_rank.begin(), by_rank.end(), [&](Interval interval) { return interval.size() % row != 0; });
  };
  std::size_t dims = 0;
  while (cuts_rows(row_size(shape, dims))) ++dims;  // ends at rows of one element
  const Index row = row_size(shape, dims);
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) units[rank] = by_rank[rank].size() / row;
  return RaggedShard(static_cast<int>(dims), std::move(units));
}

LocalShard shard_local(std::span<const Index> shape, int dim, int world_size, int rank) {
  checked_product(shape);
  RAGGED_CHECK(
      dim >= 0 && dim < static_cast<int>(shape.size()),
      "[shard_local] Expected a dim in [0, {}) for the shape [{}], but got {}.", shape.size(), fmt::join(shape, ", "),
      dim);
  RAGGED_CHECK(world_size >= 1, "[shard_local] Expected a world size of at least 1, but got {}.", world_size);
  RAGGED_CHECK(
      rank >= 0 && rank < world_size, "[shard_local] Expected a rank in [0, {}), but got {}.", world_size, rank);
  LocalShard local{std::vector<Index>(shape.begin(), shape.end()), 0};
  Index& size = local.shape[static_cast<std::size_t>(dim)];
  const Index piece = size / world_size + (size % world_size != 0 ? 1 : 0);
  // piece * rank can't overflow: piece <= size / world_size + 1 and rank < world_size < 2^31.
  local.offset = std::min(size, piece * rank);
  size = std::min(piece, size - local.offset);
  return local;
}

Index raise_block_for_shard(std::span<const Index> local_shape, Index block, int dim) {
  RAGGED_CHECK(block >= 1, "[raise_block_for_shard] Expected a block of at least 1, but got {}.", block);
  RAGGED_CHECK(
      dim >= 0 && dim < static_cast<int>(local_shape.size()),
      "[raise_block_for_shard] Expected a dim in [0, {}) for the shape [{}], but got {}.", local_shape.size(),
      fmt::join(local_shape, ", "), dim);
  const Index numel = checked_product(local_shape);
  if (dim == 0 || numel == 0) return block;
  const Index traversal = row_size(local_shape, static_cast<std::size_t>(dim));
  return std::min(capped_lcm(block, traversal, numel), numel);
}

}  // namespace ragged::layout
