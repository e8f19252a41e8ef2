// Which 32 x 32 tiles a rank's piece of a parameter holds, and where they lie in it. Pure arithmetic on shapes.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "ragged/layout/interval.h"
#include "ragged/optim/tile_codes.h"

namespace ragged::optim {

/// Whole strips of 32 full rows (the last strip of a matrix may be short) of a stack of matrices. Tiles are counted
/// from the first row of each matrix, never from the piece's, so that a piece has the same tiles on any rank.
/// Example: [3, 40, 70], elements [2800, 8400): the second and third matrix, strips of 32, 8, 32 and 8 rows, three
/// tiles a strip, 12 in all.
struct TileGeometry {
  Index matrix_rows = 0;
  Index columns = 0;
  Index first_strip = 0;  // counted over the stack
  Index num_strips = 0;
  Index numel = 0;

  struct Strip {
    Index rows = 0;
    Index offset = 0;      // of its first element, in the piece
    Index first_tile = 0;  // in the piece's scales
  };
  Strip strip(Index i) const;
  Index tiles_per_strip() const { return ceil_div(columns, kTileColumns); }
  Index num_tiles() const { return num_strips * tiles_per_strip(); }

  friend bool operator==(const TileGeometry&, const TileGeometry&) = default;
};

/// Geometry of the elements `owned` of a row-major tensor of this global shape: the last two dims are a matrix, all
/// before them a stack. Throws InvalidArgument, naming `name` and the shard_policy that would fit, for fewer than two
/// dims or an interval that cuts a strip.
TileGeometry tile_geometry(std::span<const Index> shape, layout::Interval owned, std::string_view name);

/// Rows that must stay together: 32, or all of a matrix that has fewer; 1 for an empty tensor.
Index tile_block_rows(std::span<const Index> shape);
/// The shape of a tensor with one scale a tile: the stack's dims, then ceil(rows / 32), ceil(columns / 32).
std::vector<Index> scales_shape(std::span<const Index> shape);
/// Where the scales of these elements lie in a tensor of scales_shape.
layout::Interval owned_scales(std::span<const Index> shape, layout::Interval owned, std::string_view name);

}  // namespace ragged::optim
