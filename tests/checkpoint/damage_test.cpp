// Every way in which a folder may be damaged: an error that names the file, and nothing handed over. And writing where
// there is no room.
#include <csignal>
#include <cstdlib>

#include <fmt/format.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include "ragged/checkpoint/publish.h"
#include "ragged/checkpoint/read.h"
#include "tests/checkpoint/files.h"
#include "tests/support/seeded.h"

namespace ragged::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::ragged::testing::CheckpointFolder;
using ::ragged::testing::WholeTensor;

class Damage : public ::testing::Test {
 protected:
  Damage() {
    testing::write_checkpoint(folder_.path(), tensors_, {.world_size = 3, .chunk_bytes = 16});
    for (const auto& entry : fs::directory_iterator(folder_.path())) files_.push_back(entry.path());
    std::ranges::sort(files_);
  }

  // Loads as two ranks would: all check before one takes over a byte.
  void load(int* bytes_taken = nullptr) const {
    const Checkpoint checkpoint = Checkpoint::open(folder_.path());
    std::vector<ReadPlan> plans;
    for (int rank = 0; rank < 2; ++rank) plans.push_back(testing::plan_of(checkpoint, tensors_, rank, 2));
    for (const ReadPlan& plan : plans) plan.verify();
    for (const ReadPlan& plan : plans) {
      plan.read([&](std::size_t, Index, Bytes bytes) {
        if (bytes_taken) *bytes_taken += static_cast<int>(bytes.size());
      });
    }
  }

  void expect_named(const fs::path& file, const std::string& what) const {
    int taken = 0;
    EXPECT_CHECKPOINT_ERROR(load(&taken), file.filename().string()) << what;
    EXPECT_EQ(taken, 0) << what;
    EXPECT_CHECKPOINT_ERROR(verify(Checkpoint::open(folder_.path())), file.filename().string()) << what;
  }

  CheckpointFolder folder_;
  std::vector<WholeTensor> tensors_ = testing::some_tensors();
  std::vector<fs::path> files_;
};

TEST_F(Damage, there_is_none_at_first) {
  int taken = 0;
  load(&taken);
  int bytes = 0;
  for (const WholeTensor& tensor : tensors_) bytes += static_cast<int>(tensor.bytes.size());
  EXPECT_EQ(taken, bytes);
  EXPECT_GE(files_.size(), 1u + 3u + 6u);
}

TEST_F(Damage, each_file_truncated_at_twenty_places) {
  for (const fs::path& file : files_) {
    const std::string whole = testing::read_bytes(file);
    for (std::size_t place = 0; place < 20; ++place) {
      const std::size_t size = whole.size() * place / 20;
      testing::write_bytes(file, whole.substr(0, size));
      expect_named(file, fmt::format("{} at {} of {}", file.string(), size, whole.size()));
    }
    testing::write_bytes(file, whole + std::string(1, '\0'));
    expect_named(file, file.string() + " with a byte more");
    testing::write_bytes(file, whole);
  }
  load();
}

// Each byte of each file, headers, values and JSON alike.
TEST_F(Damage, single_bits_flipped) {
  testing::Seeded random(5);
  for (const fs::path& file : files_) {
    const std::string whole = testing::read_bytes(file);
    const std::size_t step = std::max<std::size_t>(1, whole.size() / 400);
    for (std::size_t at = 0; at < whole.size(); at += step) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << random.between(0, 7)));
      testing::write_bytes(file, damaged);
      expect_named(file, fmt::format("byte {} of {}", at, file.string()));
    }
    testing::write_bytes(file, whole);
  }
  load();
}

TEST_F(Damage, a_flipped_value_names_its_tensor) {
  const Checkpoint checkpoint = Checkpoint::open(folder_.path());
  for (const WholeTensor& tensor : tensors_) {
    if (tensor.bytes.empty()) continue;
    const Checkpoint::Place place = checkpoint.places(tensor.info.name)[0];
    const fs::path file = folder_ / place.file->name;
    const std::string whole = testing::read_bytes(file);
    std::string damaged = whole;
    damaged[static_cast<std::size_t>(place.piece->begin)] ^= 1;
    testing::write_bytes(file, damaged);
    EXPECT_CHECKPOINT_ERROR(load(), fmt::format("tensor '{}' in", tensor.info.name));
    testing::write_bytes(file, whole);
  }
}

TEST_F(Damage, a_missing_file) {
  for (const fs::path& file : files_) {
    const std::string whole = testing::read_bytes(file);
    fs::remove(file);
    int taken = 0;
    EXPECT_CHECKPOINT_ERROR(load(&taken), file.filename().string());
    EXPECT_EQ(taken, 0);
    testing::write_bytes(file, whole);
  }
}

TEST_F(Damage, files_of_another_save_do_not_mix_in) {
  const CheckpointFolder other;
  testing::write_checkpoint(other.path(), testing::some_tensors(1), {.world_size = 3, .chunk_bytes = 16});
  for (const fs::path& file : files_) {
    const std::string whole = testing::read_bytes(file);
    const std::string stranger = testing::read_bytes(other.path() / file.filename());
    if (stranger == whole) continue;  // a header-only file
    testing::write_bytes(file, stranger);
    int taken = 0;
    EXPECT_CHECKPOINT_ERROR(load(&taken), "") << file;
    EXPECT_EQ(taken, 0) << file;
    testing::write_bytes(file, whole);
  }
}

TEST_F(Damage, a_folder_that_is_none) {
  EXPECT_CHECKPOINT_ERROR(Checkpoint::open(folder_ / "nowhere"), "nowhere");
  EXPECT_CHECKPOINT_ERROR(Checkpoint::open(files_[0]), files_[0].filename().string());
}

// --- writing where it can't be ---

// Saves step 2 below `root`, where step 1 is; returns what it says.
std::string try_to_save(const fs::path& root, const std::vector<WholeTensor>& tensors) {
  const CheckpointFolders folders(root);
  try {
    folders.begin(2);
    testing::write_checkpoint(folders.temporary(2), tensors, {.world_size = 2}, 2);
    folders.publish(2, 1);
  } catch (const CheckpointError& error) {
    folders.abandon(2);
    return error.what();
  }
  return "";
}

void save_first(const fs::path& root) {
  const CheckpointFolders folders(root);
  folders.begin(1);
  testing::write_checkpoint(folders.temporary(1), testing::some_tensors(), {.world_size = 2}, 1);
  folders.publish(1, 1);
}

void expect_first_untouched(const fs::path& root) {
  const auto found = CheckpointFolders(root).newest_complete();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->filename(), "step-1");
  verify(Checkpoint::open(*found));
}

TEST(NoRoom, a_full_disk_leaves_the_checkpoint_before) {
  const CheckpointFolder folder;
  if (::mount("none", folder.path().c_str(), "tmpfs", 0, "size=256k") != 0) {
    GTEST_SKIP() << "can't mount a small tmpfs here; the_largest_file shows the same by a limit";
  }
  save_first(folder.path());
  const std::string text = try_to_save(folder.path(), {testing::whole_tensor("large", "F32", {400, 1000})});
  EXPECT_NE(text.find("large"), std::string::npos) << text;
  EXPECT_NE(text.find(".safetensors"), std::string::npos) << text;
  EXPECT_NE(text.find("No space left"), std::string::npos) << text;
  expect_first_untouched(folder.path());
  EXPECT_FALSE(fs::exists(CheckpointFolders(folder.path()).temporary(2)));
  EXPECT_EQ(try_to_save(folder.path(), testing::some_tensors()), "");  // there is room again
  EXPECT_EQ(::umount(folder.path().c_str()), 0);
}

TEST(NoRoom, a_file_that_may_not_grow_leaves_the_checkpoint_before) {
  const CheckpointFolder folder;
  save_first(folder.path());
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  struct rlimit small = before;
  small.rlim_cur = 100'000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string text = try_to_save(folder.path(), {testing::whole_tensor("large", "F32", {400, 1000})});
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(text.find("tensor 'large'"), std::string::npos) << text;
  expect_first_untouched(folder.path());
}

TEST(NoRoom, a_read_only_folder_is_named) {
  const CheckpointFolder folder;
  save_first(folder.path());
  bool mounted = false;
  if (::geteuid() == 0) {  // who may write anywhere
    mounted = ::mount(folder.path().c_str(), folder.path().c_str(), nullptr, MS_BIND, nullptr) == 0;
    if (mounted) {
      ASSERT_EQ(::mount(nullptr, folder.path().c_str(), nullptr, MS_BIND | MS_REMOUNT | MS_RDONLY, nullptr), 0);
    }
  } else {
    fs::permissions(folder.path(), fs::perms::owner_read | fs::perms::owner_exec);
    mounted = true;
  }
  if (!mounted) GTEST_SKIP() << "root may write anywhere, and can't mount here";
  const std::string text = try_to_save(folder.path(), testing::some_tensors());
  EXPECT_NE(text.find("step-2"), std::string::npos) << text;
  EXPECT_NE(text.find("Choose a folder that can be written"), std::string::npos) << text;
  expect_first_untouched(folder.path());
  if (::geteuid() == 0) {
    EXPECT_EQ(::umount(folder.path().c_str()), 0);
  } else {
    fs::permissions(folder.path(), fs::perms::owner_all);
  }
}

TEST(NoRoom, a_file_in_the_way_is_named) {
  const CheckpointFolder folder;
  testing::write_bytes(folder / "checkpoints", "in the way");
  const std::string text = try_to_save(folder / "checkpoints", testing::some_tensors());
  EXPECT_NE(text.find((folder / "checkpoints").string()), std::string::npos) << text;
}

}  // namespace
}  // namespace ragged::checkpoint
