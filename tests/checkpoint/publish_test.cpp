// How step folders appear and go: names, order, and what is left after a process is killed at any moment.
#include "ragged/checkpoint/publish.h"

#include <chrono>
#include <csignal>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

#include "tests/checkpoint/files.h"
#include "tests/support/seeded.h"

namespace ragged::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::ragged::testing::CheckpointFolder;
using ::testing::ElementsAre;

// Values say which step they are of.
void save(const CheckpointFolders& folders, Index step, Index keep, int salt = -1) {
  folders.begin(step);
  testing::write_checkpoint(
      folders.temporary(step), testing::some_tensors(salt < 0 ? static_cast<int>(step) : salt), {.world_size = 2},
      step);
  folders.publish(step, keep);
}

std::vector<std::string> names(const fs::path& folder) {
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(folder)) found.push_back(entry.path().filename());
  std::ranges::sort(found);
  return found;
}

TEST(Publish, a_folder_appears_whole_and_latest_names_it) {
  const CheckpointFolder root;
  const CheckpointFolders folders(root / "new" / "checkpoints");
  EXPECT_TRUE(folders.steps().empty());
  EXPECT_FALSE(folders.newest_complete());
  folders.begin(3);
  EXPECT_TRUE(folders.steps().empty());
  testing::write_checkpoint(folders.temporary(3), testing::some_tensors());
  EXPECT_FALSE(folders.newest_complete());
  folders.publish(3, 0);
  EXPECT_THAT(names(folders.root()), ElementsAre("latest", "step-3"));
  EXPECT_EQ(testing::read_bytes(folders.root() / "latest"), "step-3\n");
  EXPECT_EQ(folders.newest_complete(), folders.folder(3));
}

TEST(Publish, keeps_the_newest) {
  const CheckpointFolder root;
  const CheckpointFolders folders(root.path());
  for (Index step : {8, 9, 10, 11}) save(folders, step, 2);
  EXPECT_THAT(folders.steps(), ElementsAre(10, 11));
  save(folders, 12, 0);
  EXPECT_THAT(folders.steps(), ElementsAre(10, 11, 12));
  save(folders, 13, 1);
  EXPECT_THAT(names(root.path()), ElementsAre("latest", "step-13"));
}

// A run that went back to an earlier step doesn't take what comes later for old.
TEST(Publish, leaves_steps_beyond_the_one_that_is_published) {
  const CheckpointFolder root;
  const CheckpointFolders folders(root.path());
  for (Index step : {1, 2, 3, 9}) save(folders, step, 0);
  save(folders, 4, 2);
  EXPECT_THAT(folders.steps(), ElementsAre(3, 4, 9));
  EXPECT_EQ(folders.newest_complete(), folders.folder(4));
}

TEST(Publish, a_step_saved_again_takes_the_place_of_the_old_one) {
  const CheckpointFolder root;
  const CheckpointFolders folders(root.path());
  save(folders, 5, 0, 1);
  save(folders, 5, 0, 2);
  EXPECT_THAT(names(root.path()), ElementsAre("latest", "step-5"));
  const Checkpoint checkpoint = Checkpoint::open(folders.folder(5));
  EXPECT_EQ(
      testing::read_rank(checkpoint, testing::some_tensors(2), 0, 1),
      testing::expected_of(testing::some_tensors(2), 0, 1));
}

TEST(Publish, resumes_from_the_newest_that_is_complete) {
  const CheckpointFolder root;
  const CheckpointFolders folders(root.path());
  for (Index step : {1, 2, 10}) save(folders, step, 0);
  fs::remove(folders.folder(10) / manifest_name(1));
  std::vector<std::string> skipped;
  EXPECT_EQ(folders.newest_complete(&skipped), folders.folder(2));
  ASSERT_EQ(skipped.size(), 1u);
  EXPECT_NE(skipped[0].find("step-10"), std::string::npos) << skipped[0];

  for (const std::string& text : {std::string("step-1\n"), std::string("step-1")}) {
    testing::write_bytes(root / kLatestFile, text);
    EXPECT_EQ(folders.newest_complete(), folders.folder(1)) << "latest has the first word";
  }
  for (const std::string& text :
       {std::string(), std::string("step-77\n"), std::string("../step-1\n"), std::string("step-01"),
        std::string(100'000, 'x')}) {
    testing::write_bytes(root / kLatestFile, text);
    EXPECT_EQ(folders.newest_complete(), folders.folder(2)) << text.substr(0, 20);
  }
  fs::remove(root / kLatestFile);
  EXPECT_EQ(folders.newest_complete(), folders.folder(2));
}

TEST(Publish, sweeps_what_was_left_and_nothing_else) {
  const CheckpointFolder root;
  const CheckpointFolders folders(root.path());
  save(folders, 1, 0);
  folders.begin(2);
  testing::write_bytes(folders.temporary(2) / "half", "written");
  fs::create_directory(root / "mine");
  testing::write_bytes(root / "step-x", "not a step");
  // Killed between two renames, where there is no exchange.
  fs::rename(folders.folder(1), root / ".old-step-1");
  folders.sweep();
  EXPECT_THAT(names(root.path()), ElementsAre("latest", "mine", "step-1", "step-x"));
  EXPECT_EQ(folders.newest_complete(), folders.folder(1));
  CheckpointFolders(root / "nowhere").sweep();
}

// A child that saves without end and says each time when it has.
struct Child {
  pid_t pid = -1;
  int said = -1;

  Child(const CheckpointFolders& folders, Index after) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("no pipe");
    pid = ::fork();
    if (pid == 0) {
      folders.sweep();
      for (Index step = after + 1;; ++step) {
        save(folders, step % 5 == 0 ? step - 1 : step, 2);  // some again
        if (::write(ends[1], "", 1) != 1) ::_exit(1);
      }
    }
    ::close(ends[1]);
    said = ends[0];
  }
  void wait_for_save() const {
    char byte = 0;
    EXPECT_EQ(::read(said, &byte, 1), 1);
  }
  void kill() const {
    EXPECT_EQ(::kill(pid, SIGKILL), 0);
    EXPECT_EQ(::waitpid(pid, nullptr, 0), pid);
    ::close(said);
  }
};

TEST(Publish, whatever_the_moment_of_the_kill_the_last_checkpoint_is_whole) {
  const CheckpointFolder root;
  const CheckpointFolders folders(root.path());
  testing::Seeded random(11);
  const auto start = std::chrono::steady_clock::now();
  for (Index step : {1, 2, 3}) save(folders, step, 2);
  const auto one_save = (std::chrono::steady_clock::now() - start) / 3;

  Index last = 3;
  int in_the_middle = 0;
  for (int kill = 0; kill < 50; ++kill) {
    const Child child(folders, last);
    for (Index saves = random.between(0, 2); saves > 0; --saves) child.wait_for_save();
    std::this_thread::sleep_for(one_save * random.between(0, 1000) / 1000);
    child.kill();

    in_the_middle += std::ranges::any_of(names(root.path()), [](const std::string& n) { return n[0] == '.'; });
    if (kill % 2 == 0) folders.sweep();  // and half of the time, the next run does it
    std::vector<std::string> skipped;
    const auto found = folders.newest_complete(&skipped);
    EXPECT_THAT(skipped, ElementsAre()) << "kill " << kill;
    ASSERT_TRUE(found) << "kill " << kill;
    const Checkpoint checkpoint = Checkpoint::open(*found);
    ASSERT_GE(checkpoint.index().step + 1, last) << "went back";
    last = checkpoint.index().step;
    verify(checkpoint);
    const auto expected = testing::some_tensors(static_cast<int>(last));
    ASSERT_EQ(testing::read_rank(checkpoint, expected, 0, 1), testing::expected_of(expected, 0, 1)) << "kill " << kill;
    for (Index step : folders.steps()) verify(Checkpoint::open(folders.folder(step)));
  }
  EXPECT_GT(last, 20);
  EXPECT_GT(in_the_middle, 0) << "of 50: all kills came between saves";
}

}  // namespace
}  // namespace ragged::checkpoint
