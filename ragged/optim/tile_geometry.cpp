#include "ragged/optim/tile_geometry.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace ragged::optim {
namespace {

// Element of the stack -> strip of the stack, if a strip begins (or the stack ends) there.
bool strip_at(Index position, const TileGeometry& g, Index* strip) {
  const Index row = position / g.columns;
  const Index in_matrix = row % g.matrix_rows;
  *strip = row / g.matrix_rows * ceil_div(g.matrix_rows, kTileRows) + in_matrix / kTileRows;
  return position % g.columns == 0 && in_matrix % kTileRows == 0;
}

Index first_row(Index strip, Index matrix_rows) {
  const Index per_matrix = ceil_div(matrix_rows, kTileRows);
  return strip / per_matrix * matrix_rows + strip % per_matrix * kTileRows;
}

}  // namespace

TileGeometry::Strip TileGeometry::strip(Index i) const {
  const Index begin = first_row(first_strip + i, matrix_rows);
  return {
      .rows = first_row(first_strip + i + 1, matrix_rows) - begin,
      .offset = (begin - first_row(first_strip, matrix_rows)) * columns,
      .first_tile = i * tiles_per_strip()};
}

TileGeometry tile_geometry(std::span<const Index> shape, layout::Interval owned, std::string_view name) {
  RAGGED_CHECK(
      shape.size() >= 2,
      "[tiles] Expected a parameter of at least 2 dims to keep in tiles, but got the shape [{}] (param '{}'). Give "
      "it the state format \"fp32\".",
      fmt::join(shape, ", "), name);
  const Index numel = checked_product(shape);
  RAGGED_CHECK(
      owned.empty() || (owned.begin >= 0 && owned.end <= numel),
      "[tiles] Expected elements of the {} that the shape [{}] has, but got [{}, {}) (param '{}').", numel,
      fmt::join(shape, ", "), owned.begin, owned.end, name);
  TileGeometry g{.matrix_rows = shape[shape.size() - 2], .columns = shape.back()};
  if (numel == 0 || owned.empty()) return g;
  Index end = 0;
  const bool whole = strip_at(owned.begin, g, &g.first_strip) && strip_at(owned.end, g, &end);
  RAGGED_CHECK(
      whole,
      "[tiles] Expected whole strips of {} rows, but elements [{}, {}) of the shape [{}] cut 32 x 32 tiles (param "
      "'{}'). Shard it with a shard_policy that returns rows({}) for it, as tile_rows_policy() does.",
      tile_block_rows(shape), owned.begin, owned.end, fmt::join(shape, ", "), name, tile_block_rows(shape));
  g.num_strips = end - g.first_strip;
  g.numel = owned.size();
  return g;
}

Index tile_block_rows(std::span<const Index> shape) {
  if (shape.size() < 2) return 1;
  return std::clamp<Index>(shape[shape.size() - 2], 1, kTileRows);
}

std::vector<Index> scales_shape(std::span<const Index> shape) {
  std::vector<Index> scales(shape.begin(), shape.end());
  scales[scales.size() - 2] = ceil_div(scales[scales.size() - 2], kTileRows);
  scales.back() = ceil_div(scales.back(), kTileColumns);
  return scales;
}

layout::Interval owned_scales(std::span<const Index> shape, layout::Interval owned, std::string_view name) {
  const TileGeometry g = tile_geometry(shape, owned, name);
  const Index begin = g.first_strip * g.tiles_per_strip();
  return {begin, begin + g.num_tiles()};
}

}  // namespace ragged::optim
