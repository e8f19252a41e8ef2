// Saved by so many ranks, read by so many others: every byte where it belongs, each once, and no more read than needed.
#include <fmt/format.h>

#include "ragged/checkpoint/read.h"
#include "tests/checkpoint/files.h"
#include "tests/support/expect_error.h"
#include "tests/support/seeded.h"

namespace ragged::checkpoint {
namespace {

using ::ragged::testing::CheckpointFolder;
using ::ragged::testing::WholeTensor;

constexpr int kWorldSizes[] = {1, 2, 3, 4, 7, 100};  // 100: more ranks than most tensors have elements

TEST(Reshard, any_number_of_ranks_reads_what_any_other_wrote) {
  const std::vector<WholeTensor> tensors = testing::some_tensors();
  for (int saved : kWorldSizes) {
    const CheckpointFolder folder;
    testing::write_checkpoint(folder.path(), tensors, {.world_size = saved});
    const Checkpoint checkpoint = Checkpoint::open(folder.path());
    verify(checkpoint);
    for (int loaded : kWorldSizes) {
      for (int rank = 0; rank < loaded; ++rank) {
        EXPECT_EQ(testing::read_rank(checkpoint, tensors, rank, loaded), testing::expected_of(tensors, rank, loaded))
            << saved << " -> " << loaded << ", rank " << rank;
      }
    }
  }
}

TEST(Reshard, chunks_of_any_size_give_the_same_values) {
  const std::vector<WholeTensor> tensors = testing::some_tensors();
  for (Index chunk : {1, 2, 7, 64, 1 << 20}) {
    const CheckpointFolder folder;
    testing::write_checkpoint(folder.path(), tensors, {.world_size = 3, .chunk_bytes = chunk});
    const Checkpoint checkpoint = Checkpoint::open(folder.path());
    verify(checkpoint);
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(testing::read_rank(checkpoint, tensors, rank, 2), testing::expected_of(tensors, rank, 2)) << chunk;
    }
  }
}

TEST(Reshard, a_rank_reads_little_more_than_it_needs) {
  const std::vector<WholeTensor> tensors = {testing::whole_tensor("w", "F32", {1000, 10})};
  const CheckpointFolder folder;
  testing::write_checkpoint(folder.path(), tensors, {.world_size = 1, .chunk_bytes = 256});
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  for (int rank = 0; rank < 8; ++rank) {
    const ReadPlan plan = testing::plan_of(checkpoint, tensors, rank, 8);
    EXPECT_EQ(plan.wanted_bytes(), 4 * testing::uneven_part(10000, rank, 8).size());
    EXPECT_GE(plan.read_bytes(), plan.wanted_bytes());
    EXPECT_LT(plan.read_bytes(), plan.wanted_bytes() + 2 * 256);
  }
  EXPECT_EQ(testing::plan_of(checkpoint, tensors, 0, 1).read_bytes(), 40000);
}

// The slow twin: every element of the box by its coordinates.
std::vector<Run> runs_by_element(std::span<const Index> shape, const layout::Box& box, layout::Interval owned) {
  std::vector<Run> result;
  for (Index source = 0; source < box.numel(); ++source) {
    Index rest = source;
    Index flat = 0;
    Index stride = 1;
    bool is_inside = true;
    for (std::size_t d = shape.size(); d-- > 0;) {
      const Index at = box.offset[d] + rest % box.size[d];
      is_inside = is_inside && at >= 0 && at < shape[d];
      flat += at * stride;
      rest /= box.size[d];
      stride *= shape[d];
    }
    if (!is_inside || !owned.contains(flat)) continue;
    const Index target = flat - owned.begin;
    if (!result.empty() && result.back().source + result.back().count == source &&
        result.back().target + result.back().count == target) {
      ++result.back().count;
    } else {
      result.push_back({source, target, 1});
    }
  }
  return result;
}

TEST(Reshard, runs_are_those_found_element_by_element_for_boxes_that_stick_out_too) {
  testing::Seeded random(41);
  for (int i = 0; i < 3000; ++i) {
    std::vector<Index> shape;
    for (Index d = random.between(0, 4); d > 0; --d) shape.push_back(random.between(1, 5));
    layout::Box box;
    for (Index size : shape) {
      const bool sticks_out = random.between(0, 3) == 0;
      box.size.push_back(random.between(1, sticks_out ? size + 3 : size));
      box.offset.push_back(random.between(sticks_out ? -2 : 0, sticks_out ? size : size - box.size.back()));
    }
    const Index numel = checked_product(shape);
    const Index begin = random.between(0, numel);
    const layout::Interval owned{begin, random.between(begin, numel)};
    ASSERT_EQ(runs(shape, box, owned), runs_by_element(shape, box, owned)) << "instance " << i;
  }
}

// As tensor parallelism leaves it: a box of the tensor a rank, or a flat part of such a box. Box b of `counts` many
// along the first two dims; rank r of it owns an uneven part.
std::vector<ReadPiece> boxed_pieces(const WholeTensor& tensor, std::vector<Index> counts, int ranks_a_box) {
  std::vector<ReadPiece> pieces;
  const std::vector<Index>& shape = tensor.info.shape;
  const auto cut = [&](std::size_t dim, Index part) { return shape[dim] * part / counts[dim]; };
  for (Index i = 0; i < counts[0]; ++i) {
    for (Index j = 0; j < counts[1]; ++j) {
      layout::Box box{std::vector<Index>(shape.size(), 0), shape};
      box.offset[0] = cut(0, i);
      box.size[0] = cut(0, i + 1) - cut(0, i);
      box.offset[1] = cut(1, j);
      box.size[1] = cut(1, j + 1) - cut(1, j);
      for (int rank = 0; rank < ranks_a_box; ++rank) {
        pieces.push_back(
            {.name = tensor.info.name,
             .dtype = tensor.info.dtype,
             .shape = shape,
             .owned = testing::uneven_part(box.numel(), rank, ranks_a_box),
             .within = box});
      }
    }
  }
  return pieces;
}

// The slow twin of `within`: element by element.
std::vector<std::byte> boxed_values(const WholeTensor& tensor, const ReadPiece& piece) {
  std::vector<std::byte> values;
  const Index item = dtype_bytes(piece.dtype);
  for (Index k = piece.owned.begin; k < piece.owned.end; ++k) {
    Index rest = k;
    Index flat = 0;
    Index stride = 1;
    for (std::size_t d = piece.shape.size(); d-- > 0;) {
      flat += (piece.within->offset[d] + rest % piece.within->size[d]) * stride;
      rest /= piece.within->size[d];
      stride *= piece.shape[d];
    }
    for (Index b = 0; b < item; ++b) values.push_back(tensor.bytes[static_cast<std::size_t>(flat * item + b)]);
  }
  return values;
}

void write_boxed(const std::filesystem::path& folder, const WholeTensor& tensor, const std::vector<ReadPiece>& parts) {
  CheckpointIndex index{.world_size = static_cast<int>(parts.size()), .chunk_bytes = 16};
  index.tensors = {tensor.info};
  for (int rank = 0; const ReadPiece& part : parts) {
    const std::vector<std::byte> values = boxed_values(tensor, part);
    const std::vector<WritePiece> pieces = {
        {.name = part.name, .dtype = part.dtype, .shape = part.shape, .owned = part.owned, .within = part.within}};
    index.manifest_checksums.push_back(write_rank_files(
        folder, rank++, pieces, [&](std::size_t) { return Bytes(values); }, {}, index.chunk_bytes));
  }
  write_file(folder / kIndexFile, to_json(index));
}

TEST(Reshard, parts_of_boxes_are_read_into_parts_of_other_boxes) {
  const std::vector<std::pair<std::vector<Index>, int>> layouts = {{{1, 1}, 1}, {{1, 1}, 3}, {{2, 1}, 1}, {{1, 3}, 1},
                                                                   {{1, 2}, 2}, {{2, 2}, 3}, {{5, 4}, 1}};
  for (const WholeTensor& tensor :
       {testing::whole_tensor("matrix", "F32", {13, 7}), testing::whole_tensor("stack", "BF16", {3, 5, 4, 2})}) {
    for (const auto& [saved_counts, saved_ranks] : layouts) {
      const CheckpointFolder folder;
      write_boxed(folder.path(), tensor, boxed_pieces(tensor, saved_counts, saved_ranks));
      const Checkpoint checkpoint = Checkpoint::open(folder.path());
      verify(checkpoint);
      for (const auto& [counts, ranks] : layouts) {
        for (const ReadPiece& piece : boxed_pieces(tensor, counts, ranks)) {
          const std::vector<std::byte> expected = boxed_values(tensor, piece);
          std::vector<std::byte> values(expected.size(), std::byte{0xa5});
          ReadPlan(checkpoint, {piece}).read([&](std::size_t, Index offset, Bytes bytes) {
            std::ranges::copy(bytes, values.begin() + offset);
          });
          EXPECT_EQ(values, expected) << tensor.info.name;
        }
      }
    }
  }
}

TEST(Reshard, boxes_that_overlap_or_leave_a_hole_are_found) {
  const WholeTensor tensor = testing::whole_tensor("w", "F32", {4, 6});
  std::vector<ReadPiece> parts = boxed_pieces(tensor, {2, 3}, 1);
  parts[1].within->offset[1] = 1;
  const CheckpointFolder overlapping;
  write_boxed(overlapping.path(), tensor, parts);
  EXPECT_CHECKPOINT_ERROR(check_complete(Checkpoint::open(overlapping.path())), "there twice");
  parts.erase(parts.begin() + 1);
  const CheckpointFolder holed;
  write_boxed(holed.path(), tensor, parts);
  EXPECT_CHECKPOINT_ERROR(check_complete(Checkpoint::open(holed.path())), "is missing");
}

class Mismatch : public ::testing::Test {
 protected:
  Mismatch() { testing::write_checkpoint(folder_.path(), tensors_, {.world_size = 2}); }
  void expect_refused(const std::vector<WholeTensor>& wanted, const std::string& fragment) {
    const Checkpoint checkpoint = Checkpoint::open(folder_.path());
    EXPECT_CHECKPOINT_ERROR(testing::plan_of(checkpoint, wanted, 0, 1), fragment);
  }
  CheckpointFolder folder_;
  std::vector<WholeTensor> tensors_ = testing::some_tensors();
};

TEST_F(Mismatch, tensors_that_are_missing_or_unwanted_are_named) {
  auto wanted = tensors_;
  wanted.push_back(testing::whole_tensor("extra", "F32", {2}));
  expect_refused(wanted, "Expected tensor 'extra'");
  wanted = tensors_;
  wanted.erase(wanted.begin() + 4);
  expect_refused(wanted, "a use for tensor 'conv'");
  const Checkpoint checkpoint = Checkpoint::open(folder_.path());
  EXPECT_NO_THROW(ReadPlan(checkpoint, {}, true));
}

TEST_F(Mismatch, other_shapes_dtypes_and_formats_are_refused) {
  auto wanted = tensors_;
  wanted[0].info.shape = {5, 13};
  expect_refused(wanted, "'embed' of shape [5, 13]");
  wanted = tensors_;
  wanted[1].info.dtype = "F16";
  expect_refused(wanted, "'layers.0.weight' as F16");
  wanted = tensors_;
  wanted[3].info.format = "dynamic 32x32";
  expect_refused(wanted, "in format 'dynamic 32x32'");
}

TEST_F(Mismatch, elements_that_are_missing_or_there_twice_are_found) {
  // Rank 1's manifest says it holds what rank 0 holds, all sealed well.
  const CheckpointFolder other;
  const auto tensor = testing::whole_tensor("w", "F32", {4});
  const auto write = [&](layout::Interval first, layout::Interval second) {
    CheckpointIndex index{.world_size = 2};
    index.tensors = {tensor.info};
    int rank = 0;
    for (const layout::Interval owned : {first, second}) {
      const std::vector<WritePiece> pieces = {{.name = "w", .dtype = "F32", .shape = {4}, .owned = owned}};
      index.manifest_checksums.push_back(write_rank_files(other.path(), rank++, pieces, [&](std::size_t) {
        return Bytes(tensor.bytes).first(static_cast<std::size_t>(4 * owned.size()));
      }));
    }
    write_file(other / kIndexFile, to_json(index));
    return Checkpoint::open(other.path());
  };
  EXPECT_CHECKPOINT_ERROR(verify(write({0, 2}, {3, 4})), "'w' once, but 2 is missing");
  EXPECT_CHECKPOINT_ERROR(verify(write({0, 2}, {2, 3})), "'w' once, but 3 is missing");
  EXPECT_CHECKPOINT_ERROR(verify(write({0, 3}, {2, 4})), "'w' once, but 2 is there twice");
  EXPECT_CHECKPOINT_ERROR(testing::plan_of(write({0, 3}, {2, 4}), {tensor}, 0, 1), "there twice");
}

TEST_F(Mismatch, no_tensor_may_be_asked_for_twice) {
  const Checkpoint checkpoint = Checkpoint::open(folder_.path());
  EXPECT_INVALID(testing::plan_of(checkpoint, {tensors_[0], tensors_[0]}, 0, 1), "'embed' twice");
}

}  // namespace
}  // namespace ragged::checkpoint
