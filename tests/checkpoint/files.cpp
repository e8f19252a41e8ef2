#include "tests/checkpoint/files.h"

#include <algorithm>
#include <atomic>
#include <fstream>
#include <sstream>

#include <unistd.h>

namespace ragged::testing {
namespace {

namespace fs = std::filesystem;
using namespace checkpoint;  // NOLINT: the subject

std::vector<ReadPiece> pieces_of(const std::vector<WholeTensor>& tensors, int rank, int world_size) {
  std::vector<ReadPiece> pieces;
  for (const WholeTensor& tensor : tensors) {
    pieces.push_back(
        {.name = tensor.info.name,
         .dtype = tensor.info.dtype,
         .shape = tensor.info.shape,
         .format = tensor.info.format,
         .owned = uneven_part(checked_product(tensor.info.shape), rank, world_size)});
  }
  return pieces;
}

}  // namespace

CheckpointFolder::CheckpointFolder() {
  static std::atomic<int> count = 0;
  folder_ = fs::temp_directory_path() / ("ragged_ckpt_" + std::to_string(getpid()) + "_" + std::to_string(count++));
  fs::create_directories(folder_);
}

CheckpointFolder::~CheckpointFolder() {
  std::error_code error;
  fs::remove_all(folder_, error);
}

WholeTensor whole_tensor(
    const std::string& name, const std::string& dtype, std::vector<Index> shape, int salt, const std::string& format) {
  WholeTensor tensor;
  tensor.info = {.name = name, .dtype = dtype, .shape = std::move(shape), .format = format, .placement = ""};
  const Index bytes = checked_product(tensor.info.shape) * dtype_bytes(dtype);
  unsigned state = static_cast<unsigned>(name.size()) * 31u + static_cast<unsigned>(name.back()) +
      977u * static_cast<unsigned>(salt);
  for (Index i = 0; i < bytes; ++i) {
    state = state * 1664525u + 1013904223u;
    tensor.bytes.push_back(static_cast<std::byte>(state >> 24));
  }
  return tensor;
}

std::vector<WholeTensor> some_tensors(int salt) {
  return {
      whole_tensor("embed", "F32", {13, 5}, salt),
      whole_tensor("layers.0.weight", "BF16", {3, 4, 7}, salt),
      whole_tensor("layers.0.bias", "F32", {7}, salt),
      whole_tensor("state.layers.0.weight.codes", "U8", {3, 4, 7}, salt, "power 32x32"),
      whole_tensor("conv", "F32", {2, 3, 2, 5}, salt),
      whole_tensor("scalar", "F64", {}, salt),
      whole_tensor("step", "I64", {1}, salt),
      whole_tensor("nothing", "F32", {0, 3}, salt)};
}

layout::Interval uneven_part(Index numel, int rank, int world_size) {
  // Cuts grow with the square: the first ranks own little or nothing.
  const Index scale = static_cast<Index>(world_size) * world_size;
  return {numel * rank * rank / scale, numel * (rank + 1) * (rank + 1) / scale};
}

void write_checkpoint(
    const fs::path& folder, const std::vector<WholeTensor>& tensors, const Layout& layout, Index step,
    const Facts& facts) {
  CheckpointIndex index{.step = step, .world_size = layout.world_size, .chunk_bytes = layout.chunk_bytes};
  index.facts = facts;
  for (const WholeTensor& tensor : tensors) index.tensors.push_back(tensor.info);
  for (int rank = 0; rank < layout.world_size; ++rank) {
    std::vector<WritePiece> pieces;
    for (const WholeTensor& tensor : tensors) {
      pieces.push_back(
          {.name = tensor.info.name,
           .dtype = tensor.info.dtype,
           .shape = tensor.info.shape,
           .owned = uneven_part(checked_product(tensor.info.shape), rank, layout.world_size),
           .announces_empty = rank == layout.world_size - 1});
    }
    const auto fetch = [&](std::size_t i) {
      const Index item = dtype_bytes(pieces[i].dtype);
      return Bytes(tensors[i].bytes)
          .subspan(
              static_cast<std::size_t>(pieces[i].owned.begin * item),
              static_cast<std::size_t>(pieces[i].owned.size() * item));
    };
    index.manifest_checksums.push_back(
        write_rank_files(folder, rank, pieces, fetch, {{"rank", std::to_string(rank)}}, layout.chunk_bytes));
  }
  write_file(folder / kIndexFile, to_json(index));
}

ReadPlan plan_of(const Checkpoint& checkpoint, const std::vector<WholeTensor>& tensors, int rank, int world_size) {
  return {checkpoint, pieces_of(tensors, rank, world_size)};
}

std::vector<std::vector<std::byte>> read_rank(
    const Checkpoint& checkpoint, const std::vector<WholeTensor>& tensors, int rank, int world_size) {
  std::vector<std::vector<std::byte>> values;
  std::vector<std::vector<int>> times;  // each byte comes once
  for (const std::vector<std::byte>& part : expected_of(tensors, rank, world_size)) {
    values.emplace_back(part.size(), std::byte{0xa5});
    times.emplace_back(part.size(), 0);
  }
  const ReadPlan plan = plan_of(checkpoint, tensors, rank, world_size);
  plan.verify();
  plan.read([&](std::size_t piece, Index offset, Bytes bytes) {
    ASSERT_LE(static_cast<std::size_t>(offset) + bytes.size(), values[piece].size());
    std::ranges::copy(bytes, values[piece].begin() + offset);
    for (std::size_t i = 0; i < bytes.size(); ++i) ++times[piece][static_cast<std::size_t>(offset) + i];
  });
  for (const std::vector<int>& counts : times) EXPECT_TRUE(std::ranges::all_of(counts, [](int n) { return n == 1; }));
  return values;
}

std::vector<std::vector<std::byte>> expected_of(const std::vector<WholeTensor>& tensors, int rank, int world_size) {
  std::vector<std::vector<std::byte>> values;
  for (const WholeTensor& tensor : tensors) {
    const layout::Interval owned = uneven_part(checked_product(tensor.info.shape), rank, world_size);
    const Index item = dtype_bytes(tensor.info.dtype);
    values.emplace_back(tensor.bytes.begin() + owned.begin * item, tensor.bytes.begin() + owned.end * item);
  }
  return values;
}

std::string read_bytes(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file, std::ios::binary).rdbuf();
  return text.str();
}

void write_bytes(const fs::path& file, const std::string& bytes) {
  std::error_code error;
  fs::remove(file, error);  // emptying a file in place is slow: ext4 then writes it out at once
  std::ofstream(file, std::ios::binary) << bytes;
}

}  // namespace ragged::testing
