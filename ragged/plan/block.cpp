#include "ragged/plan/block.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace ragged::plan {
namespace {

// The last two dims seen as a matrix; a tensor of fewer dims is a column of one-element rows.
struct Matrix {
  Index rows = 1;
  Index columns = 1;
  Index restart = 0;  // elements of one matrix in a stack of them
};

Matrix matrix_of(std::span<const Index> shape) {
  const std::size_t rank = shape.size();
  if (rank == 0) return {};
  if (rank == 1) return {.rows = shape[0]};
  const Index rows = shape[rank - 2];
  const Index columns = shape[rank - 1];
  return {.rows = rows, .columns = columns, .restart = rank > 2 ? rows * columns : 0};
}

BlockExtent strip(const Block& block, std::span<const Index> shape, const Matrix& matrix, std::string_view param) {
  RAGGED_CHECK(
      block.count <= matrix.rows,
      "[block] Expected at most the {} rows of one matrix of the shape [{}], but got {} (param "
      "'{}'). Lower the count, or use whole().",
      matrix.rows, fmt::join(shape, ", "), to_string(block), param);
  return {.block = block.count * matrix.columns, .restart = matrix.restart};
}

}  // namespace

Block elements(Index count) {
  return {.kind = Block::Kind::kElements, .count = count};
}

Block rows(Index count) {
  return {.kind = Block::Kind::kRows, .count = count};
}

Block whole() {
  return {.kind = Block::Kind::kWhole};
}

Block tile(Index rows, Index columns) {
  return {.kind = Block::Kind::kTile, .count = rows, .columns = columns};
}

std::string to_string(const Block& block) {
  switch (block.kind) {
    case Block::Kind::kElements:
      return fmt::format("elements({})", block.count);
    case Block::Kind::kRows:
      return fmt::format("rows({})", block.count);
    case Block::Kind::kWhole:
      return "whole()";
    case Block::Kind::kTile:
      return fmt::format("tile({}, {})", block.count, block.columns);
  }
  return "unknown block";
}

BlockExtent block_extent(const Block& block, std::span<const Index> shape, std::string_view param) {
  RAGGED_CHECK(
      block.count >= 1 && (block.kind != Block::Kind::kTile || block.columns >= 1),
      "[block] Expected counts of at least 1, but got {} (param '{}').", to_string(block), param);
  RAGGED_CHECK(
      block.kind != Block::Kind::kTile || shape.size() >= 2,
      "[block] Expected a parameter of at least 2 dims for {}, but got the shape [{}] (param "
      "'{}'). Use elements() or rows().",
      to_string(block), fmt::join(shape, ", "), param);
  const Index numel = checked_product(shape);
  if (numel == 0) return {};
  switch (block.kind) {
    case Block::Kind::kElements:
      RAGGED_CHECK(
          block.count <= numel,
          "[block] Expected at most the {} elements of the shape [{}], but got {} (param '{}'). "
          "Lower the count, or use whole().",
          numel, fmt::join(shape, ", "), to_string(block), param);
      return {.block = block.count};
    case Block::Kind::kWhole:
      return {.block = numel};
    case Block::Kind::kRows:
    case Block::Kind::kTile:
      return strip(block, shape, matrix_of(shape), param);
  }
  RAGGED_ASSERT(false, "unknown kind of block");
  return {};
}

}  // namespace ragged::plan
