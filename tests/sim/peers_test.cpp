// The simulated layouts of other engines against recorded vectors (elements, fp32).
#include "ragged/sim/peers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/expect_error.h"

namespace ragged::sim {
namespace {

using plan::ParamSpec;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

std::vector<ParamSpec> specs(const std::vector<std::vector<Index>>& shapes) {
  std::vector<ParamSpec> params;
  for (const std::vector<Index>& shape : shapes) {
    params.push_back({.name = "p" + std::to_string(params.size()), .shape = shape});
  }
  return params;
}

const std::vector<std::vector<Index>> kA = {{2, 6}, {4, 4}, {4, 4}, {1, 2}, {1, 6}};
const std::vector<std::vector<Index>> kB = {{3, 4}, {5, 4}, {4}, {4}, {2, 6}};
const std::vector<std::vector<Index>> kC = {{7, 3}, {5, 2}, {9}, {1}};
const std::vector<std::vector<Index>> kD = {{768, 256}, {256, 256}, {256, 1024}, {256}, {1024, 256}};
const std::vector<std::vector<Index>> kE = {{4, 5, 6}, {4, 6}, {10, 6}, {6}};

struct Vector {
  const char* name;
  std::vector<std::vector<Index>> shapes;
  int ranks;
  Index fsdp1_aligned, fsdp1_plain, fsdp2, zero3, v1, v2, v2_block2;
  std::vector<Index> v2_starts, v2_block2_starts;
};

const std::vector<Vector> kVectors = {
    {"A", kA, 2, 54, 52, 60, 52, 72, 72, 96, {0, 12, 32, 28, 48}, {36, 0, 16, 56, 48}},
    {"A", kA, 5, 55, 55, 110, 70, 60, 60, 120, {0, 12, 32, 28, 48}, {36, 0, 16, 56, 48}},
    {"B", kB, 2, 52, 52, 60, 52, 72, 72, 96, {0, 12, 32, 48, 36}, {24, 0, 48, 52, 36}},
    {"B", kB, 5, 55, 55, 80, 60, 60, 60, 120, {0, 12, 32, 48, 36}, {24, 0, 48, 52, 36}},
    {"C", kC, 2, 50, 42, 48, 44, 48, 48, 48, {0, 30, 21, 40}, {0, 24, 34, 22}},
    {"C", kC, 5, 50, 45, 55, 50, 60, 60, 60, {0, 30, 21, 40}, {0, 24, 34, 22}},
    {"D",
     kD,
     2,
     786'688,
     786'688,
     786'688,
     786'688,
     788'480,
     788'480,
     790'528,
     {0, 196'608, 262'144, 786'432, 524'288},
     {0, 196'608, 262'144, 786'432, 524'288}},
    {"D",
     kD,
     5,
     786'690,
     786'690,
     792'580,
     786'700,
     788'480,
     788'480,
     788'480,
     {0, 196'608, 262'144, 786'432, 524'288},
     {0, 196'608, 262'144, 786'432, 524'288}},
    {"E", kE, 2, 210, 210, 210, 210, 240, 240, 240, {0, 180, 120, 204}, {0, 180, 120, 204}},
    {"E", kE, 5, 210, 210, 250, 215, 300, 300, 300, {0, 180, 120, 204}, {0, 180, 120, 204}},
};

TEST(Peers, sizes_and_starts_are_those_recorded) {
  for (const Vector& v : kVectors) {
    SCOPED_TRACE(std::string(v.name) + " on " + std::to_string(v.ranks));
    const std::vector<ParamSpec> params = specs(v.shapes);
    const PeerOptions fp32{.ranks = v.ranks, .start_alignment = 4};
    EXPECT_EQ(peer_layout(Peer::kFsdp1, params, fp32).size, v.fsdp1_aligned);
    EXPECT_EQ(peer_layout(Peer::kFsdp1, params, {.ranks = v.ranks, .start_alignment = 1}).size, v.fsdp1_plain);
    EXPECT_EQ(peer_layout(Peer::kFsdp2, params, fp32).size, v.fsdp2);
    EXPECT_EQ(peer_layout(Peer::kZero3, params, fp32).size, v.zero3);
    EXPECT_EQ(peer_layout(Peer::kMegatronV1, params, fp32).size, v.v1);
    const PeerLayout v2 = peer_layout(Peer::kMegatronV2, params, fp32);
    EXPECT_EQ(v2.size, v.v2);
    EXPECT_THAT(v2.starts, ElementsAreArray(v.v2_starts));
    const PeerLayout block2 = peer_layout(Peer::kMegatronV2, params, {.ranks = v.ranks, .block_rows = 2});
    EXPECT_EQ(block2.size, v.v2_block2);
    EXPECT_THAT(block2.starts, ElementsAreArray(v.v2_block2_starts));
  }
}

TEST(Peers, padding_is_what_belongs_to_no_parameter) {
  const PeerLayout layout = peer_layout(Peer::kFsdp2, specs(kA), {.ranks = 5});
  EXPECT_EQ(layout.padding, 110 - 52);
}

TEST(Peers, megatron_v2_pads_for_replicas_too) {
  const std::vector<ParamSpec> params = specs(kC);
  EXPECT_EQ(peer_layout(Peer::kMegatronV2, params, {.ranks = 2, .mesh_ranks = 4}).size, 48);
  EXPECT_EQ(peer_layout(Peer::kMegatronV2, params, {.ranks = 2, .mesh_ranks = 16}).size, 96);
}

TEST(Peers, a_group_per_row_size_shrinks_the_grid) {
  const std::vector<ParamSpec> params = specs({{4, 4}, {4, 6}});
  EXPECT_EQ(peer_layout(Peer::kMegatronV1, params, {.ranks = 4}).size, 48);  // grid 12
  const PeerLayout apart = peer_layout(Peer::kMegatronV1PerRow, params, {.ranks = 4});
  EXPECT_EQ(apart.size, 16 + 24);
  EXPECT_EQ(apart.groups, 2);
}

TEST(Peers, experts_are_a_group_of_their_own) {
  std::vector<ParamSpec> params = specs({{4, 4}, {4, 6}});
  params[1].name = "mlp.experts.down_proj";
  EXPECT_EQ(peer_layout(Peer::kMegatronV1, params, {.ranks = 4}).groups, 2);
}

TEST(Peers, a_fragment_may_be_cut_inside_a_row) {
  // LoRA of rank 8 on the linears of a Llama-2-7B block. The grid exceeds the small matrices, which lie anywhere.
  std::vector<std::vector<Index>> shapes;
  for (int i = 0; i < 4; ++i) shapes.insert(shapes.end(), {{8, 4096}, {4096, 8}});
  for (int i = 0; i < 2; ++i) shapes.insert(shapes.end(), {{8, 4096}, {11008, 8}});
  shapes.insert(shapes.end(), {{8, 11008}, {4096, 8}});
  std::vector<ParamSpec> params = specs(shapes);
  for (ParamSpec& param : params) param.block = param.shape[1];
  EXPECT_EQ(peer_layout(Peer::kMegatronV1, params, {.ranks = 2}).size, 704'512);
  EXPECT_EQ(peer_layout(Peer::kMegatronV1, params, {.ranks = 4}).size, 704'512);
  EXPECT_EQ(peer_layout(Peer::kMegatronV1, params, {.ranks = 8}).size, 1'409'024);
  EXPECT_GT(peer_layout(Peer::kMegatronV1, params, {.ranks = 4}).blocks_cut, 0);
  EXPECT_GT(peer_layout(Peer::kMegatronV1, params, {.ranks = 8}).blocks_cut, 0);
}

TEST(Peers, blocks_cut_counts_blocks_not_borders) {
  EXPECT_EQ(blocks_cut(0, 12, 4, 0, 4), 0);
  EXPECT_EQ(blocks_cut(0, 12, 4, 0, 6), 1);
  EXPECT_EQ(blocks_cut(0, 12, 12, 0, 2), 1);  // five borders in one block
  EXPECT_EQ(blocks_cut(2, 12, 4, 0, 6), 1);   // a border at 4 of the tensor is legal, one at 10 isn't
  EXPECT_EQ(blocks_cut(0, 12, 4, 6, 6), 0);   // runs of 6: blocks of 4 and 2
  EXPECT_EQ(blocks_cut(0, 12, 4, 6, 8), 1);
  EXPECT_EQ(blocks_cut(0, 0, 1, 0, 8), 0);
}

TEST(Peers, floors_cut_blocks_where_rows_do_not_divide) {
  const std::vector<ParamSpec> params = {{.name = "w", .shape = {10, 4}, .block = 4}};
  EXPECT_EQ(peer_layout(Peer::kFsdp2, params, {.ranks = 3}).blocks_cut, 0);
  EXPECT_EQ(peer_layout(Peer::kZero3, params, {.ranks = 3}).blocks_cut, 1);  // shards of 14
}

TEST(Peers, no_ranks_are_refused) {
  EXPECT_INVALID(peer_layout(Peer::kFsdp1, specs(kA), {.ranks = 0}), "at least 1 rank");
}

}  // namespace
}  // namespace ragged::sim
