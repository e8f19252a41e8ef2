#include "ragged/plan/block.h"

#include <vector>

#include "tests/support/expect_error.h"

namespace ragged::plan {
namespace {

using Shape = std::vector<Index>;

BlockExtent extent(const Block& block, const Shape& shape) {
  return block_extent(block, shape, "wq");
}

TEST(Block, of_elements_counts_elements_and_never_restarts) {
  EXPECT_EQ(extent(elements(1), {7}), (BlockExtent{1, 0}));
  EXPECT_EQ(extent(elements(32), {8, 16}), (BlockExtent{32, 0}));
  EXPECT_EQ(extent(elements(24), {2, 3, 4}), (BlockExtent{24, 0}));
}

TEST(Block, of_rows_runs_over_a_matrix) {
  EXPECT_EQ(extent(rows(1), {8, 16}), (BlockExtent{16, 0}));
  EXPECT_EQ(extent(rows(3), {8, 16}), (BlockExtent{48, 0}));
  EXPECT_EQ(extent(rows(8), {8, 16}), (BlockExtent{128, 0}));
}

TEST(Block, of_rows_takes_a_vector_as_rows_of_one_element) {
  EXPECT_EQ(extent(rows(5), {7}), (BlockExtent{5, 0}));
  EXPECT_EQ(extent(rows(1), {}), (BlockExtent{1, 0}));
}

TEST(Block, of_rows_restarts_at_each_matrix_of_a_stack) {
  EXPECT_EQ(extent(rows(2), {3, 5, 4}), (BlockExtent{8, 20}));
  EXPECT_EQ(extent(rows(5), {3, 5, 4}), (BlockExtent{20, 20}));
  EXPECT_EQ(extent(rows(2), {2, 3, 5, 4}), (BlockExtent{8, 20}));
}

TEST(Block, of_a_tile_is_a_strip_of_its_rows) {
  EXPECT_EQ(extent(tile(4, 8), {16, 32}), (BlockExtent{128, 0}));
  EXPECT_EQ(extent(tile(4, 8), {6, 16, 32}), (BlockExtent{128, 512}));
  EXPECT_EQ(extent(tile(4, 128), {16, 32}), (BlockExtent{128, 0})) << "one short tile a strip";
}

TEST(Block, of_the_whole_is_the_tensor) {
  EXPECT_EQ(extent(whole(), {8, 16}), (BlockExtent{128, 0}));
  EXPECT_EQ(extent(whole(), {3, 5, 4}), (BlockExtent{60, 0}));
  EXPECT_EQ(extent(whole(), {}), (BlockExtent{1, 0}));
}

TEST(Block, of_an_empty_tensor_is_one_element) {
  for (const Block& block : {elements(32), rows(32), whole(), tile(32, 32)}) {
    EXPECT_EQ(extent(block, {0, 4}), (BlockExtent{1, 0})) << to_string(block);
    EXPECT_EQ(extent(block, {3, 4, 0}), (BlockExtent{1, 0})) << to_string(block);
  }
}

TEST(Block, refuses_counts_below_one) {
  EXPECT_INVALID(extent(elements(0), {8}), "elements(0) (param 'wq')");
  EXPECT_INVALID(extent(rows(-1), {8, 8}), "rows(-1)");
  EXPECT_INVALID(extent(tile(0, 8), {8, 8}), "tile(0, 8)");
  EXPECT_INVALID(extent(tile(8, 0), {8, 8}), "tile(8, 0)");
  EXPECT_INVALID(extent(elements(0), {0}), "counts of at least 1");
}

TEST(Block, refuses_more_than_the_tensor_or_one_matrix_has) {
  EXPECT_INVALID(extent(elements(9), {8}), "at most the 8 elements");
  EXPECT_INVALID(extent(rows(9), {8}), "at most the 8 rows");
  EXPECT_INVALID(extent(rows(9), {8, 4}), "(param 'wq')");
  EXPECT_INVALID(extent(rows(6), {3, 5, 4}), "the 5 rows of one matrix of the shape [3, 5, 4]");
  EXPECT_INVALID(extent(tile(6, 4), {3, 5, 4}), "tile(6, 4)");
}

TEST(Block, refuses_tiles_of_less_than_a_matrix) {
  EXPECT_INVALID(extent(tile(2, 2), {8}), "at least 2 dims for tile(2, 2)");
  EXPECT_INVALID(extent(tile(2, 2), {}), "(param 'wq')");
}

TEST(Block, refuses_negative_sizes) {
  EXPECT_INVALID(extent(rows(1), {-8, 4}), "got -8");
}

TEST(Block, prints_itself) {
  EXPECT_EQ(to_string(elements(8)), "elements(8)");
  EXPECT_EQ(to_string(rows(32)), "rows(32)");
  EXPECT_EQ(to_string(whole()), "whole()");
  EXPECT_EQ(to_string(tile(128, 64)), "tile(128, 64)");
}

}  // namespace
}  // namespace ragged::plan
