#include "ragged/layout/mesh.h"

#include <algorithm>

#include "tests/support/expect_error.h"

namespace ragged::layout {
namespace {

Mesh three_dims() {
  return Mesh(
      {{"replicate", 2, DimRole::kReplicate}, {"shard", 3, DimRole::kShard}, {"tp", 2, DimRole::kForeign}},
      {10, 11, 12, 13, 14, 15, 26, 25, 24, 23, 22, 21});
}

TEST(Mesh, of_one_dim_has_one_group) {
  for (int world_size : {1, 2, 3, 4, 7}) {
    const Mesh mesh = Mesh::shard(world_size);
    EXPECT_EQ(mesh.size(), world_size);
    EXPECT_EQ(mesh.find(DimRole::kShard), 0);
    ASSERT_EQ(mesh.groups(0).size(), 1u);
    EXPECT_EQ(mesh.groups(0)[0], mesh.ranks());
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(mesh.coordinates(rank), std::vector<int>{rank});
      EXPECT_EQ(mesh.group(0, rank), mesh.ranks());
    }
  }
}

TEST(Mesh, of_two_dims_shards_within_and_replicates_across) {
  const Mesh mesh = Mesh::hybrid(2, 3);
  EXPECT_EQ(mesh.size(), 6);
  EXPECT_EQ(mesh.find("replicate"), 0);
  EXPECT_EQ(mesh.find("shard"), 1);
  EXPECT_EQ(mesh.groups(1), (std::vector<std::vector<int>>{{0, 1, 2}, {3, 4, 5}}));
  EXPECT_EQ(mesh.groups(0), (std::vector<std::vector<int>>{{0, 3}, {1, 4}, {2, 5}}));
  EXPECT_EQ(mesh.coordinates(5), (std::vector<int>{1, 2}));
  EXPECT_EQ(mesh.group(0, 4), (std::vector<int>{1, 4}));
}

TEST(Mesh, groups_differ_in_one_coordinate_only) {
  const Mesh mesh = three_dims();
  for (int dim = 0; dim < 3; ++dim) {
    for (int rank : mesh.ranks()) {
      // The slow twin: everybody whose other coordinates agree, in mesh order.
      std::vector<int> expected;
      for (int other : mesh.ranks()) {
        std::vector<int> difference = mesh.coordinates(other);
        difference[static_cast<std::size_t>(dim)] = mesh.coordinates(rank)[static_cast<std::size_t>(dim)];
        if (difference == mesh.coordinates(rank)) expected.push_back(other);
      }
      EXPECT_EQ(mesh.group(dim, rank), expected) << "dim " << dim << ", rank " << rank;
    }
  }
}

TEST(Mesh, groups_of_a_dim_hold_every_rank_once_in_ascending_order) {
  const Mesh mesh = three_dims();
  for (int dim = 0; dim < 3; ++dim) {
    std::vector<int> seen;
    int last_position = -1;
    for (const std::vector<int>& group : mesh.groups(dim)) {
      EXPECT_EQ(group.size(), static_cast<std::size_t>(mesh.size(dim)));
      EXPECT_EQ(group, mesh.group(dim, group.back()));
      const auto first = std::find(mesh.ranks().begin(), mesh.ranks().end(), group.front());
      const int position = static_cast<int>(first - mesh.ranks().begin());
      EXPECT_GT(position, last_position);
      last_position = position;
      seen.insert(seen.end(), group.begin(), group.end());
    }
    EXPECT_TRUE(std::is_permutation(seen.begin(), seen.end(), mesh.ranks().begin(), mesh.ranks().end()));
  }
}

TEST(Mesh, finds_dims_by_name_and_role) {
  const Mesh mesh = three_dims();
  EXPECT_EQ(mesh.find("tp"), 2);
  EXPECT_EQ(mesh.find("pp"), -1);
  EXPECT_EQ(mesh.find(DimRole::kForeign), 2);
  EXPECT_EQ(Mesh::shard(2).find(DimRole::kReplicate), -1);
  EXPECT_EQ(mesh.size(1), 3);
}

TEST(Mesh, compares_as_a_value) {
  EXPECT_EQ(Mesh::shard(4), Mesh::shard(4));
  EXPECT_NE(Mesh::shard(4), Mesh::shard(3));
  EXPECT_NE(Mesh::hybrid(2, 3), Mesh::hybrid(3, 2));
  EXPECT_EQ(Mesh::shard(2), Mesh({{"shard", 2, DimRole::kShard}}, {0, 1}));
  EXPECT_NE(Mesh::shard(2), Mesh({{"shard", 2, DimRole::kShard}}, {1, 0}));
}

TEST(Mesh, prints_its_dims_and_unusual_ranks) {
  EXPECT_EQ(to_string(Mesh::hybrid(2, 4)), "Mesh(replicate=2, shard=4)");
  EXPECT_EQ(to_string(Mesh({{"shard", 2, DimRole::kShard}}, {5, 3})), "Mesh(shard=2, ranks=[5, 3])");
}

TEST(Mesh, refuses_bad_dims) {
  EXPECT_INVALID(Mesh(std::vector<MeshDim>{}), "at least one dim");
  EXPECT_INVALID(Mesh({{"shard", 0, DimRole::kShard}}), "got 0 (dim 'shard')");
  EXPECT_INVALID(Mesh::shard(-2), "got -2");
  EXPECT_INVALID(Mesh({{"", 2, DimRole::kShard}}), "empty one");
  EXPECT_INVALID(Mesh({{"a", 2, DimRole::kShard}, {"a", 2, DimRole::kForeign}}), "'a' twice");
  EXPECT_INVALID(Mesh({{"a", 1 << 20, DimRole::kShard}, {"b", 1 << 20, DimRole::kForeign}}), "2^31 ranks");
}

TEST(Mesh, refuses_bad_ranks) {
  const std::vector<MeshDim> dims{{"shard", 2, DimRole::kShard}};
  EXPECT_INVALID(Mesh(dims, {0, 1, 2}), "Expected 2 ranks");
  EXPECT_INVALID(Mesh(dims, {0}), "but got 1");
  EXPECT_INVALID(Mesh(dims, {3, 3}), "3 twice");
  EXPECT_INVALID(Mesh(dims, {0, -1}), "got -1");
}

TEST(Mesh, refuses_questions_from_outside) {
  const Mesh mesh = three_dims();
  EXPECT_INVALID(mesh.coordinates(0), "a rank of the mesh, but got 0");
  EXPECT_INVALID(mesh.group(0, 99), "got 99");
  EXPECT_INVALID(mesh.group(3, 10), "a dim in [0, 3), but got 3");
  EXPECT_INVALID(mesh.groups(-1), "got -1");
  EXPECT_INVALID(mesh.size(3), "got 3");
}

}  // namespace
}  // namespace ragged::layout
