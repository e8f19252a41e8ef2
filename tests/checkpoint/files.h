// Checkpoints made without torch or ranks: whole tensors as bytes, cut as asked, and folders that go away.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ragged/checkpoint/file.h"
#include "ragged/checkpoint/read.h"
#include "ragged/checkpoint/write.h"

/// Expects `statement` to throw CheckpointError with `fragment` in its text.
#define EXPECT_CHECKPOINT_ERROR(statement, fragment) \
  EXPECT_THAT(                                       \
      [&] { static_cast<void>(statement); },         \
      ::testing::ThrowsMessage<::ragged::CheckpointError>(::testing::HasSubstr(fragment)))

namespace ragged::testing {

/// A folder of its own, removed at the end.
class CheckpointFolder {
 public:
  CheckpointFolder();
  ~CheckpointFolder();
  CheckpointFolder(const CheckpointFolder&) = delete;
  CheckpointFolder& operator=(const CheckpointFolder&) = delete;
  const std::filesystem::path& path() const { return folder_; }
  std::filesystem::path operator/(const std::string& name) const { return folder_ / name; }

 private:
  std::filesystem::path folder_;
};

struct WholeTensor {
  checkpoint::TensorInfo info;
  std::vector<std::byte> bytes;
};

/// Bytes that depend on the name, the place and `salt`.
WholeTensor whole_tensor(
    const std::string& name, const std::string& dtype, std::vector<Index> shape, int salt = 0,
    const std::string& format = "");

/// Awkward shapes: primes, scalars, nothing, four dims, codes.
std::vector<WholeTensor> some_tensors(int salt = 0);

/// The flat interval of a tensor of `numel` elements that a rank of so many owns: uneven, some empty.
layout::Interval uneven_part(Index numel, int rank, int world_size);

struct Layout {
  int world_size = 1;
  Index chunk_bytes = 16;
};
/// Writes all ranks' files and the index into `folder`, which must exist.
void write_checkpoint(
    const std::filesystem::path& folder, const std::vector<WholeTensor>& tensors, const Layout& layout = {},
    Index step = 7, const checkpoint::Facts& facts = {});

/// What a rank of so many reads of these tensors; its values go to `out`, one vector a tensor.
checkpoint::ReadPlan plan_of(
    const checkpoint::Checkpoint& checkpoint, const std::vector<WholeTensor>& tensors, int rank, int world_size);
std::vector<std::vector<std::byte>> read_rank(
    const checkpoint::Checkpoint& checkpoint, const std::vector<WholeTensor>& tensors, int rank, int world_size);
/// The same, cut out of the tensors.
std::vector<std::vector<std::byte>> expected_of(const std::vector<WholeTensor>& tensors, int rank, int world_size);

std::string read_bytes(const std::filesystem::path& file);
void write_bytes(const std::filesystem::path& file, const std::string& bytes);

}  // namespace ragged::testing
