#include "ragged/optim/matrix_layout.h"

#include <map>

#include <fmt/ranges.h>

#include "ragged/base/error.h"

namespace ragged::optim {
namespace {

using layout::Interval;

// Rows and columns of the matrices in a parameter, and how many there are.
struct Stack {
  Index count = 1;
  Index rows = 0;
  Index cols = 0;
};

Stack stack_of(const MatrixParam& param, std::string_view optimizer) {
  const std::vector<Index>& shape = param.shape;
  RAGGED_CHECK(
      shape.size() >= 2,
      "[{}] Expected parameters of two and more dims, but got the shape [{}] (param '{}'). Send it to AdamW.",
      optimizer, fmt::join(shape, ", "), param.name);
  if (param.flatten_rest) return {.rows = shape[0], .cols = checked_product(std::span(shape).subspan(1))};
  const std::size_t last = shape.size() - 1;
  return {.count = checked_product(std::span(shape).first(last - 1)), .rows = shape[last - 1], .cols = shape[last]};
}

void check_held(const MatrixParam& param, int ranks, std::string_view optimizer) {
  RAGGED_CHECK(
      std::ssize(param.held) == ranks, "[{}] Expected an interval for each of {} ranks, but got {} (param '{}').",
      optimizer, ranks, param.held.size(), param.name);
  Index end = 0;
  for (const Interval& interval : param.held) {
    if (interval.empty()) continue;
    RAGGED_CHECK(
        interval.begin == end,
        "[{}] Expected intervals that ascend without gap or overlap, but got [{}, {}) after {} (param '{}').",
        optimizer, interval.begin, interval.end, end, param.name);
    end = interval.end;
  }
  RAGGED_CHECK(
      end == checked_product(param.shape),
      "[{}] Expected intervals that cover all {} elements, but got {} (param '{}').", optimizer,
      checked_product(param.shape), end, param.name);
}

std::vector<Interval> row_ranges_of(const MatrixParam& param, Index rows, std::string_view optimizer) {
  if (param.row_ranges.empty()) return {{0, rows}};
  Index end = 0;
  for (const Interval& range : param.row_ranges) {
    RAGGED_CHECK(
        range.begin == end && range.end > end,
        "[{}] Expected row ranges that follow each other, but got [{}, {}) after {} (param '{}').", optimizer,
        range.begin, range.end, end, param.name);
    end = range.end;
  }
  RAGGED_CHECK(
      end == rows,
      "[{}] Expected row ranges over all {} rows, but got {} (param '{}'). Name every part of the fused weight.",
      optimizer, rows, end, param.name);
  return param.row_ranges;
}

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  return (hash ^ value) * 0x100000001B3ULL + (hash >> 47);
}

}  // namespace

std::vector<Interval> ranges_of_rows(std::span<const Index> counts) {
  std::vector<Interval> ranges;
  Index begin = 0;
  for (const Index rows : counts) {
    ranges.push_back({begin, begin + rows});
    begin += rows;
  }
  return ranges;
}

std::vector<ParamMatrix> list_matrices(std::span<const MatrixParam> params, int ranks, std::string_view optimizer) {
  std::map<int, int> positions;
  for (const MatrixParam& param : params) positions[param.bucket] = 0;
  int next = 0;
  for (auto& [bucket, position] : positions) position = next++;
  std::vector<ParamMatrix> matrices;
  for (std::size_t p = 0; p < params.size(); ++p) {
    const Stack stack = stack_of(params[p], optimizer);
    check_held(params[p], ranks, optimizer);
    const std::vector<Interval> ranges = row_ranges_of(params[p], stack.rows, optimizer);
    if (stack.count == 0 || stack.rows == 0 || stack.cols == 0) continue;
    for (Index i = 0; i < stack.count; ++i) {
      for (const Interval& range : ranges) {
        matrices.push_back(
            {.param = static_cast<int>(p),
             .rows = range.size(),
             .cols = stack.cols,
             .offset = (i * stack.rows + range.begin) * stack.cols,
             .bucket = positions.at(params[p].bucket)});
      }
    }
  }
  return matrices;
}

MatrixRoots assign_roots(
    std::span<const MatrixParam> params, std::vector<ParamMatrix>& matrices, std::span<const double> costs,
    const plan::RootOptions& options) {
  std::vector<plan::RootMatrix> roots;
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const ParamMatrix& m = matrices[i];
    const Interval range{m.offset, m.offset + m.rows * m.cols};
    roots.push_back(
        {.cost = costs[i],
         .numel = range.size(),
         .bucket = m.bucket,
         .pieces = plan::pieces_of(params[static_cast<std::size_t>(m.param)].held, range)});
  }
  const plan::RootPlan plan = plan::assign_roots(roots, options);
  MatrixRoots assigned{.loads = plan.loads, .hash = plan::hash(plan)};
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    ParamMatrix& m = matrices[i];
    m.root = plan.roots[i] % options.world_size;
    m.replica = plan.roots[i] / options.world_size;
    m.is_local = plan::sole_holder(roots[i].pieces, roots[i].numel) == m.root;
    for (const Index value : {m.rows, m.cols, m.offset, static_cast<Index>(m.bucket)})
      assigned.hash = mix(assigned.hash, static_cast<std::uint64_t>(value));
    assigned.pieces.push_back(std::move(roots[i].pieces));
  }
  return assigned;
}

MatrixPiece piece_on_rank(
    const MatrixParam& param, const ParamMatrix& matrix, std::span<const plan::HeldPiece> pieces, int rank) {
  for (const plan::HeldPiece& piece : pieces) {
    if (piece.rank != rank) continue;
    const Interval held = param.held[static_cast<std::size_t>(rank)];
    return {.piece = piece.interval, .in_param = matrix.offset + piece.interval.begin - held.begin};
  }
  return {};
}

}  // namespace ragged::optim
