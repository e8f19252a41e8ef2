// Files and folders as a checkpoint needs them: whole reads and writes at an offset, bytes that are on the disk when
// we say so, and errors that name the file. Not a stream, and no buffers of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "ragged/base/math.h"
#include "ragged/checkpoint/checksum.h"

namespace ragged::checkpoint {

/// An open file; closed by the destructor. Every failure is a CheckpointError with the path and the system's words,
/// and `what` (the tensor, for example) where one is given. Reads of one object may run in several threads.
class File {
 public:
  /// Throws where there is no such file.
  static File open(const std::filesystem::path& path);
  /// Makes the file anew.
  static File create(const std::filesystem::path& path);
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  const std::filesystem::path& path() const { return path_; }
  Index size() const;
  /// All of `bytes`, or an error: a file that ends early is truncated.
  void read(Index offset, std::span<std::byte> bytes, std::string_view what = {}) const;
  void write(Index offset, Bytes bytes, std::string_view what = {}) const;
  /// What was written is on the disk, and stays there through a loss of power. Then closes.
  void sync_and_close();

 private:
  File(std::filesystem::path path, int descriptor);
  void close();

  std::filesystem::path path_;
  int descriptor_ = -1;
};

/// A whole file of at most `limit` bytes.
std::string read_file(const std::filesystem::path& path, Index limit);
/// A whole file, synced.
void write_file(const std::filesystem::path& path, std::string_view text);
/// New, renamed and removed names in the folder are on the disk.
void sync_folder(const std::filesystem::path& folder);
/// Replaces `to` where it is a file or an empty folder.
void move(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace ragged::checkpoint
