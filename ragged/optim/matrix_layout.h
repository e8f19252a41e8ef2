// The matrices that parameters are made of, for optimizers that work on whole ones: stacks and fused rows taken apart,
// which ranks hold what of each, and its root. Functions of shapes and intervals, alike on all ranks; they move
// nothing (matrix_exchange.h does) and know neither units nor what is done to a matrix.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ragged/layout/interval.h"
#include "ragged/plan/matrix_roots.h"

namespace ragged::optim {

/// A parameter as all ranks see it.
struct MatrixParam {
  std::string name;
  std::vector<Index> shape;              // global; the last two dims are matrices, those before them stack
  std::vector<layout::Interval> held{};  // by rank of the shard group: its row-major elements, ascending; may be empty
  /// Fused projections: rows [begin, end) of each matrix are a matrix of their own. They tile the rows; none: one.
  std::vector<layout::Interval> row_ranges{};
  int bucket = 0;             // what travels together; buckets run in ascending order
  bool flatten_rest = false;  // [out, ...] is one matrix of out rows (convolutions)
};

/// MatrixParam::row_ranges of matrices that lie one below the other with so many rows each; none for none.
std::vector<layout::Interval> ranges_of_rows(std::span<const Index> counts);

/// One matrix of a list of parameters.
struct ParamMatrix {
  int param = 0;
  Index rows = 0;
  Index cols = 0;
  Index offset = 0;      // of its first element in the parameter
  int bucket = 0;        // position in the order of buckets
  int root = 0;          // rank of the shard group
  int replica = 0;       // rank of the replicate group that works on it, where replicas share the work
  bool is_local = true;  // the root holds all of it
};

/// Matrices without elements are left out; roots are still to be assigned. Throws InvalidArgument, `optimizer` in its
/// text, on a parameter below two dims, intervals that don't cover it, row ranges that don't tile its rows.
std::vector<ParamMatrix> list_matrices(std::span<const MatrixParam> params, int ranks, std::string_view optimizer);

/// What root assignment says beside the roots themselves.
struct MatrixRoots {
  std::vector<std::vector<plan::HeldPiece>> pieces{};  // by matrix
  std::vector<double> loads{};                         // by candidate; see plan::RootPlan
  std::uint64_t hash = 0;                              // of roots and geometry
};
/// Sets root, replica and is_local of each matrix; `costs` by matrix, in any unit.
MatrixRoots assign_roots(
    std::span<const MatrixParam> params, std::vector<ParamMatrix>& matrices, std::span<const double> costs,
    const plan::RootOptions& options);

/// What one rank holds of a matrix; both empty and 0 where it holds nothing.
struct MatrixPiece {
  layout::Interval piece{};  // of the matrix's elements
  Index in_param = 0;        // where that lies in the rank's piece of the parameter
};
MatrixPiece piece_on_rank(
    const MatrixParam& param, const ParamMatrix& matrix, std::span<const plan::HeldPiece> pieces, int rank);

}  // namespace ragged::optim
