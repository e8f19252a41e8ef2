// Tiles of a piece against a walk over all rows.
#include "ragged/optim/tile_geometry.h"

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"

namespace ragged::test {
namespace {

using optim::tile_geometry;
using optim::TileGeometry;

struct WalkedStrip {
  Index begin;  // element of the whole tensor
  Index rows;
};

std::vector<WalkedStrip> walk(const std::vector<Index>& shape) {
  const Index rows = shape[shape.size() - 2];
  const Index columns = shape.back();
  Index all_rows = 1;
  for (std::size_t d = 0; d + 1 < shape.size(); ++d) all_rows *= shape[d];
  std::vector<WalkedStrip> strips;
  for (Index row = 0; row < all_rows; ++row) {
    if (row % rows % 32 == 0) strips.push_back({row * columns, 0});
    ++strips.back().rows;
  }
  return strips;
}

TEST(TileGeometry, lists_the_strips_of_every_piece) {
  const std::vector<std::vector<Index>> shapes{{1, 1},  {1, 97}, {31, 5},     {32, 32},      {33, 33},
                                               {40, 7}, {64, 1}, {3, 40, 70}, {2, 3, 33, 4}, {5, 1, 31}};
  for (const auto& shape : shapes) {
    const std::vector<WalkedStrip> strips = walk(shape);
    const Index numel = checked_product(shape);
    for (std::size_t first = 0; first < strips.size(); ++first) {
      for (std::size_t last = first; last < strips.size(); ++last) {
        const Index end = last + 1 < strips.size() ? strips[last + 1].begin : numel;
        const TileGeometry g = tile_geometry(shape, {strips[first].begin, end}, "w");
        ASSERT_EQ(g.num_strips, static_cast<Index>(last - first + 1));
        ASSERT_EQ(g.numel, end - strips[first].begin);
        const Index per_strip = (shape.back() + 31) / 32;
        ASSERT_EQ(g.num_tiles(), g.num_strips * per_strip);
        for (Index i = 0; i < g.num_strips; ++i) {
          const WalkedStrip& expected = strips[first + static_cast<std::size_t>(i)];
          ASSERT_EQ(g.strip(i).rows, expected.rows);
          ASSERT_EQ(g.strip(i).offset, expected.begin - strips[first].begin);
          ASSERT_EQ(g.strip(i).first_tile, i * per_strip);
        }
        const auto first_tile = static_cast<Index>(first) * per_strip;
        ASSERT_EQ(
            optim::owned_scales(shape, {strips[first].begin, end}, "w"),
            (layout::Interval{first_tile, first_tile + g.num_tiles()}));
      }
    }
    Index tiles = 1;
    for (const Index size : optim::scales_shape(shape)) tiles *= size;
    EXPECT_EQ(tiles, tile_geometry(shape, {0, numel}, "w").num_tiles());
  }
}

TEST(TileGeometry, has_no_tiles_where_a_rank_owns_nothing) {
  const std::vector<Index> shape{40, 7};
  EXPECT_EQ(tile_geometry(shape, {0, 0}, "w").num_tiles(), 0);
  EXPECT_EQ(tile_geometry(std::vector<Index>{0, 7}, {0, 0}, "w").num_tiles(), 0);
  EXPECT_EQ(tile_geometry(std::vector<Index>{7, 0}, {0, 0}, "w").num_tiles(), 0);
}

TEST(TileGeometry, names_the_policy_where_a_piece_cuts_a_tile) {
  const std::vector<Index> matrix{64, 10};
  EXPECT_INVALID(
      tile_geometry(matrix, {0, 310}, "layers.0.up"),
      "[tiles] Expected whole strips of 32 rows, but elements [0, 310) of the shape [64, 10] cut 32 x 32 tiles "
      "(param 'layers.0.up'). Shard it with a shard_policy that returns rows(32) for it");
  EXPECT_INVALID(tile_geometry(matrix, {160, 640}, "w"), "[160, 640)");
  EXPECT_INVALID(tile_geometry(matrix, {325, 640}, "w"), "rows(32)");  // begins inside a row
  const std::vector<Index> flat{10, 10};
  EXPECT_INVALID(tile_geometry(flat, {0, 50}, "w"), "rows(10)");
  // 32 rows of the stack, but not of its matrices.
  const std::vector<Index> stack{3, 40, 2};
  EXPECT_INVALID(tile_geometry(stack, {0, 128}, "w"), "rows(32)");
}

TEST(TileGeometry, refuses_vectors_and_elements_beyond_the_end) {
  EXPECT_INVALID(tile_geometry(std::vector<Index>{5000}, {0, 5000}, "norm"), "Give it the state format \"fp32\"");
  EXPECT_INVALID(tile_geometry(std::vector<Index>{4, 4}, {0, 17}, "w"), "Expected elements of the 16");
}

}  // namespace
}  // namespace ragged::test
