// Which rank works on which whole matrix, when work is per matrix and matrices are cut over ranks: Newton-Schulz
// (Muon), eigenvectors (SOAP). A pure function of shapes and intervals, so that all ranks agree without talking.
//
// [Note: roots]
// A matrix that one rank holds whole stays there, moves nothing, and counts as that rank's load; a bucket of only such
// matrices communicates nothing. But costly matrices of a layer lie side by side, in every layer on the same rank, so
// that all of them staying may leave it far above the others. Only if the largest load would then pass `local_limit`
// times load_bound(), matrices leave: first in buckets that communicate anyway, then in as few others as it takes, the
// one first whose matrices weigh most on ranks above the limit. Within those buckets what costs most an element goes.
//
// What doesn't stay goes, longest first, to the rank with the least load so far (LPT: at most 4/3 of the best for
// independent jobs), over all buckets together, since balance within each bucket would load the same ranks again and
// again. Order is total: cost, then elements, both descending, then position. Ranks of equal load: the one with less
// load in this bucket, so that neighbours in time go to different ranks; then the one that holds the largest piece,
// which then needn't travel; then the lowest.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ragged/layout/interval.h"

namespace ragged::plan {

using layout::Interval;

/// Floating-point operations of `steps` Newton-Schulz steps: steps (4 s^2 l + 2 s^3), s the shorter side.
double newton_schulz_cost(Index rows, Index cols, int steps);

/// What one rank holds of a matrix: a run of its row-major elements.
struct HeldPiece {
  int rank = 0;
  Interval interval{};
  friend bool operator==(const HeldPiece&, const HeldPiece&) = default;
};

/// Non-empty pieces of a range of a tensor's row-major elements, by rank, in the range's own elements:
/// `held` has each rank's interval of the tensor.
std::vector<HeldPiece> pieces_of(std::span<const Interval> held, Interval range);

struct RootMatrix {
  double cost = 0.0;
  Index numel = 0;
  int bucket = 0;
  std::vector<HeldPiece> pieces{};  // none: nobody's matrix in particular
};

struct RootOptions {
  int world_size = 1;
  /// Groups of ranks that hold the same: rank r of replica k is candidate k * world_size + r.
  int replicas = 1;
  /// Of load_bound(): up to this largest load no whole matrix leaves its rank. Infinity: all stay; 0: none does.
  double local_limit = 1.25;
};

struct RootPlan {
  std::vector<int> roots{};     // by matrix: candidate
  std::vector<double> loads{};  // by candidate
  /// Elements that travel to a root and, as many, back; within a replica.
  Index moved_numel = 0;
  int num_moving_buckets = 0;  // of which a matrix travels, in any replica

  friend bool operator==(const RootPlan&, const RootPlan&) = default;
};

/// No assignment of whole matrices to so many candidates has a largest load below this: the mean; and for each k, since
/// of the k * candidates + 1 largest some candidate has k + 1, the smallest k + 1 of those.
double load_bound(std::vector<double> costs, int candidates);

/// Throws InvalidArgument on fewer than one rank or replica, or a piece of a rank that there isn't.
RootPlan assign_roots(std::span<const RootMatrix> matrices, const RootOptions& options);

/// The rank that holds all `numel` elements; -1 when none does, or when there are none.
int sole_holder(std::span<const HeldPiece> pieces, Index numel);

/// Equal plans have equal hashes on every machine.
std::uint64_t hash(const RootPlan& plan);

}  // namespace ragged::plan
