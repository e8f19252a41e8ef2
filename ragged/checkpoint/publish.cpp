#include "ragged/checkpoint/publish.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <string_view>
#include <system_error>

#include <fcntl.h>

#include "ragged/checkpoint/check.h"
#include "ragged/checkpoint/file.h"
#include "ragged/checkpoint/read.h"

namespace ragged::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStep = "step-";
constexpr std::string_view kTemporary = ".tmp-";
constexpr std::string_view kReplaced = ".old-";  // a step's folder while its successor takes the name
constexpr Index kMaxLatest = 64;

std::string step_name(Index step) {
  return fmt::format("{}{}", kStep, step);
}

// The number in "step-200"; none for any other name, "step-0200" included.
std::optional<Index> step_of(std::string_view name) {
  if (!name.starts_with(kStep)) return std::nullopt;
  name.remove_prefix(kStep.size());
  Index step = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  if (error != std::errc() || end != name.data() + name.size() || step < 0) return std::nullopt;
  return step_name(step).substr(kStep.size()) == name ? std::optional(step) : std::nullopt;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (auto it = fs::directory_iterator(folder, error); !error && it != fs::directory_iterator(); it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  return names;
}

}  // namespace

CheckpointFolders::CheckpointFolders(fs::path root) : root_(std::move(root)) {}

fs::path CheckpointFolders::folder(Index step) const {
  return root_ / step_name(step);
}

fs::path CheckpointFolders::temporary(Index step) const {
  return root_ / fmt::format("{}{}", kTemporary, step_name(step));
}

void CheckpointFolders::begin(Index step) const {
  std::error_code error;
  fs::create_directories(root_, error);
  const fs::path path = temporary(step);
  if (!error) fs::remove_all(path, error);
  if (!error) fs::create_directory(path, error);
  RAGGED_CHECKPOINT_CHECK(
      !error, "[save] Expected to make the folder '{}', but got: {}. Choose a folder that can be written.",
      path.string(), error.message());
}

void CheckpointFolders::publish(Index step, Index keep) const {
  sync_folder(temporary(step));
  take_name(step);
  sync_folder(root_);
  point_latest(step);
  if (keep <= 0) return;
  std::vector<Index> older = steps();
  std::erase_if(older, [&](Index other) { return other > step; });
  for (std::size_t i = 0; i + static_cast<std::size_t>(keep) < older.size(); ++i) drop(older[i]);
}

void CheckpointFolders::take_name(Index step) const {
  const fs::path from = temporary(step);
  const fs::path to = folder(step);
  std::error_code error;
  if (!fs::exists(to, error)) {
    move(from, to);
    return;
  }
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0) {
    // A file system without exchange: sweep() undoes the first rename if the second never comes.
    const fs::path replaced = root_ / fmt::format("{}{}", kReplaced, step_name(step));
    fs::remove_all(replaced, error);
    move(to, replaced);
    move(from, to);
    fs::remove_all(replaced, error);
    return;
  }
  fs::remove_all(from, error);  // now the old one; what is left of it is swept away later
}

void CheckpointFolders::point_latest(Index step) const {
  const fs::path next = root_ / fmt::format("{}{}", kTemporary, kLatestFile);
  write_file(next, step_name(step) + "\n");
  move(next, root_ / kLatestFile);
  sync_folder(root_);
}

void CheckpointFolders::drop(Index step) const {
  const fs::path nameless = root_ / fmt::format("{}drop-{}", kTemporary, step_name(step));
  std::error_code error;
  fs::remove_all(nameless, error);
  move(folder(step), nameless);
  fs::remove_all(nameless, error);
  RAGGED_CHECKPOINT_CHECK(!error, "[save] Expected to remove '{}', but got: {}.", nameless.string(), error.message());
}

void CheckpointFolders::abandon(Index step) const noexcept {
  std::error_code error;
  fs::remove_all(temporary(step), error);
}

void CheckpointFolders::sweep() const noexcept {
  try {
    for (const std::string& name : names_in(root_)) {
      std::error_code error;
      const fs::path path = root_ / name;
      if (name.starts_with(kReplaced)) {
        const std::optional<Index> step = step_of(std::string_view(name).substr(kReplaced.size()));
        if (step && !fs::exists(folder(*step), error)) {
          fs::rename(path, folder(*step), error);
        } else {
          fs::remove_all(path, error);
        }
      } else if (name.starts_with(kTemporary)) {
        fs::remove_all(path, error);
      }
    }
  } catch (const std::exception&) {
    // Only room is lost; the next run tries again.
  }
}

std::vector<Index> CheckpointFolders::steps() const {
  std::vector<Index> steps;
  for (const std::string& name : names_in(root_)) {
    if (const std::optional<Index> step = step_of(name)) steps.push_back(*step);
  }
  std::ranges::sort(steps);
  return steps;
}

std::optional<fs::path> CheckpointFolders::newest_complete(std::vector<std::string>* skipped) const {
  const auto note = [&](std::string line) {
    if (skipped) skipped->push_back(std::move(line));
  };
  std::vector<Index> candidates = steps();
  std::ranges::reverse(candidates);
  std::error_code error;
  if (fs::exists(root_ / kLatestFile, error)) {
    try {
      std::string name = read_file(root_ / kLatestFile, kMaxLatest);
      if (name.ends_with('\n')) name.pop_back();
      const std::optional<Index> step = step_of(name);
      RAGGED_CHECKPOINT_CHECK(
          step, "[checkpoint] Expected the name of a step in '{}/{}', but got '{}'.", root_.string(), kLatestFile,
          name);
      std::erase(candidates, *step);
      candidates.insert(candidates.begin(), *step);
    } catch (const CheckpointError& problem) {
      note(problem.what());
    }
  }
  for (Index step : candidates) {
    try {
      static_cast<void>(Checkpoint::open(folder(step)));
      return folder(step);
    } catch (const CheckpointError& problem) {
      note(problem.what());
    }
  }
  return std::nullopt;
}

}  // namespace ragged::checkpoint
