// The exchange of cut matrices by itself: every element against what a full gather shows, there and back, and what was
// sent.
#include "ragged/optim/matrix_exchange.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/ranks.h"
#include "tests/support/seeded.h"

namespace ragged::test {
namespace {

using layout::Interval;
using optim::ExchangedMatrix;
using optim::MatrixExchange;

const std::vector<int> kWorlds{1, 2, 3, 4, 7};

// Prime shapes and less, cut anywhere; most ranks have nothing of most matrices, and some of none.
std::vector<ExchangedMatrix> random_matrices(int world_size, std::uint64_t seed) {
  ::ragged::testing::Seeded random(seed);
  const std::vector<std::pair<Index, Index>> shapes{{1, 1}, {2, 3}, {7, 5}, {13, 11}, {31, 1}, {17, 29}};
  std::vector<ExchangedMatrix> matrices;
  for (Index i = random.between(1, 9); i > 0; --i) {
    const auto [rows, cols] = random.pick(shapes);
    ExchangedMatrix matrix{.numel = rows * cols, .root = static_cast<int>(random.between(-1, world_size - 1))};
    Index begin = 0;
    for (int rank = 0; rank < world_size && begin < matrix.numel; ++rank) {
      if (rank + 1 < world_size && random.one_in(2)) continue;
      const Index end = rank + 1 == world_size ? matrix.numel : random.between(begin, matrix.numel);
      if (end > begin) matrix.pieces.push_back({rank, {begin, end}});
      begin = end;
    }
    matrices.push_back(std::move(matrix));
  }
  return matrices;
}

// Element e of matrix i; no two alike.
at::Tensor values_of(const ExchangedMatrix& matrix, std::size_t i) {
  return at::arange(matrix.numel).to(at::kFloat) + static_cast<float>(1000 * (i + 1));
}

// What a rank holds of all matrices, laid out by its own offsets.
at::Tensor packed(const std::vector<ExchangedMatrix>& matrices, const MatrixExchange& exchange, int rank) {
  at::Tensor held = at::full({exchange.held_numel()}, -1.0F);
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    for (const plan::HeldPiece& piece : matrices[i].pieces) {
      if (piece.rank != rank || exchange.held_offset(i) < 0) continue;
      held.narrow(0, exchange.held_offset(i), piece.interval.size())
          .copy_(values_of(matrices[i], i).narrow(0, piece.interval.begin, piece.interval.size()));
    }
  }
  return held;
}

// The slow way to a whole matrix: everybody broadcasts every piece to everybody.
at::Tensor gathered(const ExchangedMatrix& matrix, const at::Tensor& mine, const comm::Communicator& group) {
  at::Tensor whole = at::full({matrix.numel}, -1.0F);
  for (const plan::HeldPiece& piece : matrix.pieces) {
    const Interval at = piece.interval;
    at::Tensor part = at::full({at.size()}, -1.0F);
    if (piece.rank == group.rank()) part.copy_(mine.narrow(0, at.begin, at.size()));
    group.broadcast(part, piece.rank, "twin").wait();
    whole.narrow(0, at.begin, at.size()).copy_(part);
  }
  return whole;
}

Index sent_elements(const std::vector<ExchangedMatrix>& matrices, int rank, bool back) {
  Index sent = 0;
  for (const ExchangedMatrix& matrix : matrices) {
    for (const plan::HeldPiece& piece : matrix.pieces) {
      if (matrix.root < 0 || piece.rank == matrix.root) continue;
      if ((back ? matrix.root : piece.rank) == rank) sent += piece.interval.size();
    }
  }
  return sent;
}

bool any_travels(const std::vector<ExchangedMatrix>& matrices, int world_size) {
  for (int rank = 0; rank < world_size; ++rank) {
    if (sent_elements(matrices, rank, false) > 0) return true;
  }
  return false;
}

void there_and_back(
    const comm::Communicator& group, const std::vector<ExchangedMatrix>& matrices, at::ScalarType dtype) {
  const MatrixExchange exchange(matrices, group, "matrices");
  EXPECT_EQ(exchange.is_idle(), !any_travels(matrices, group.size()));
  const at::Tensor held = packed(matrices, exchange, group.rank());
  EXPECT_EQ(at::sum(held == -1.0F).item<Index>(), 0);  // offsets leave no hole
  const at::Tensor original = held.to(dtype);
  const at::Tensor travels = original.clone();
  const at::Tensor rooted = at::full({exchange.rooted_numel()}, -1.0F).to(dtype);
  comm::Traffic before = group.traffic();
  exchange.to_roots(travels, rooted).wait();
  const Index there = group.traffic().all_to_all_bytes - before.all_to_all_bytes;
  EXPECT_EQ(there, sent_elements(matrices, group.rank(), false) * static_cast<Index>(c10::elementSize(dtype)));

  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const at::Tensor twin = gathered(matrices[i], values_of(matrices[i], i), group);
    if (matrices[i].root != group.rank()) continue;
    const at::Tensor whole = exchange.assemble(rooted, i);
    EXPECT_TRUE(at::equal(whole, twin.to(dtype))) << i;
    exchange.disassemble(whole * 2, rooted, i);
  }
  travels.fill_(-1);
  before = group.traffic();
  exchange.to_holders(rooted, travels).wait();
  EXPECT_EQ(
      group.traffic().all_to_all_bytes - before.all_to_all_bytes,
      sent_elements(matrices, group.rank(), true) * static_cast<Index>(c10::elementSize(dtype)));
  EXPECT_EQ(group.traffic().all_to_alls - before.all_to_alls, exchange.is_idle() || group.size() == 1 ? 0 : 1);
  EXPECT_TRUE(at::equal(travels, original * 2));
}

TEST(MatrixExchange, whole_matrices_reach_their_roots_and_pieces_their_holders) {
  for (const int world_size : kWorlds) {
    run_ranks(world_size, [&](comm::World& world) {
      const auto groups = world.groups(layout::Mesh::shard(world_size));
      for (std::uint64_t seed = 0; seed < 12; ++seed) {
        SCOPED_TRACE(fmt::format("{} ranks, seed {}, rank {}", world_size, seed, world.rank()));
        const auto matrices = random_matrices(world_size, seed);
        there_and_back(groups.shard, matrices, seed % 2 == 0 ? at::kFloat : at::kDouble);
      }
    });
  }
}

TEST(MatrixExchange, bf16_travels_as_it_is) {
  run_ranks(3, [](comm::World& world) {
    const auto groups = world.groups(layout::Mesh::shard(3));
    // Beyond 256 bf16 can't count, so values repeat; positions are the other test's.
    there_and_back(groups.shard, random_matrices(3, 5), at::kBFloat16);
  });
}

// Rank 1 of three has nothing and is nobody's root: it takes part, and sends nothing.
TEST(MatrixExchange, an_empty_rank_takes_part_and_own_pieces_are_not_sent) {
  run_ranks(3, [](comm::World& world) {
    const auto groups = world.groups(layout::Mesh::shard(3));
    const std::vector<ExchangedMatrix> matrices{
        {.numel = 10, .pieces = {{0, {0, 4}}, {2, {4, 10}}}, .root = 0},
        {.numel = 7, .pieces = {{0, {0, 5}}, {2, {5, 7}}}, .root = 2},
        {.numel = 3, .pieces = {{0, {0, 3}}}, .root = -1}};
    const MatrixExchange exchange(matrices, groups.shard, "matrices");
    const std::vector<Index> held{9, 0, 8}, rooted{10, 0, 7}, own{4, 0, 2};
    const auto rank = static_cast<std::size_t>(world.rank());
    EXPECT_EQ(exchange.held_numel(), held[rank]);
    EXPECT_EQ(exchange.rooted_numel(), rooted[rank]);
    EXPECT_EQ(exchange.own_numel(), own[rank]);
    EXPECT_EQ(exchange.held_offset(2), -1);
    there_and_back(groups.shard, matrices, at::kFloat);
    EXPECT_EQ(groups.shard.traffic().all_to_all_bytes, 4 * (held[rank] - own[rank] + rooted[rank] - own[rank]));
  });
}

TEST(MatrixExchange, nothing_to_send_is_no_collective) {
  run_ranks(2, [](comm::World& world) {
    const auto groups = world.groups(layout::Mesh::shard(2));
    // Both at their roots already, and one that nobody has.
    const std::vector<ExchangedMatrix> matrices{
        {.numel = 6, .pieces = {{0, {0, 6}}}, .root = 0},
        {.numel = 6, .pieces = {{1, {0, 6}}}, .root = 1},
        {.numel = 0, .root = 1}};
    EXPECT_TRUE(MatrixExchange(matrices, groups.shard, "matrices").is_idle());
    there_and_back(groups.shard, matrices, at::kFloat);
    EXPECT_EQ(groups.shard.traffic().all_to_alls, 0);
    EXPECT_TRUE(MatrixExchange({}, groups.shard, "matrices").is_idle());
  });
}

}  // namespace
}  // namespace ragged::test
