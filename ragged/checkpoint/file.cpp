#include "ragged/checkpoint/file.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ragged/checkpoint/check.h"

namespace ragged::checkpoint {
namespace {

// One call moves at most 2 GiB on Linux.
constexpr std::size_t kMostAtOnce = std::size_t{1} << 30;

[[noreturn]] void fail(
    std::string_view expected, const std::filesystem::path& path, std::string_view what, int error,
    std::string_view remedy = "") {
  detail::throw_checkpoint_error(fmt::format(
      "[checkpoint] Expected to {} '{}'{}, but got: {}.{}", expected, path.string(),
      what.empty() ? "" : fmt::format(" ({})", what), std::system_category().message(error), remedy));
}

std::string_view remedy_of(int error) {
  if (error == ENOSPC || error == EDQUOT) return " Free some space, or keep fewer checkpoints.";
  if (error == EACCES || error == EROFS || error == EPERM) return " Choose a folder that can be written.";
  return "";
}

// 64-bit offsets everywhere: off_t is as wide on the machines that torch runs on.
static_assert(sizeof(off_t) == sizeof(Index));

}  // namespace

File::File(std::filesystem::path path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}

File File::open(const std::filesystem::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail("read", path, {}, errno);
  return {path, descriptor};
}

File File::create(const std::filesystem::path& path) {
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor < 0) fail("write", path, {}, errno, remedy_of(errno));
  return {path, descriptor};
}

File::File(File&& other) noexcept : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    close();
    path_ = std::move(other.path_);
    descriptor_ = std::exchange(other.descriptor_, -1);
  }
  return *this;
}

File::~File() {
  close();
}

void File::close() {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

Index File::size() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) fail("read", path_, {}, errno);
  return status.st_size;
}

void File::read(Index offset, std::span<std::byte> bytes, std::string_view what) const {
  while (!bytes.empty()) {
    const ssize_t got = ::pread(descriptor_, bytes.data(), std::min(bytes.size(), kMostAtOnce), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", path_, what, errno);
    RAGGED_CHECKPOINT_CHECK(
        got > 0, "[checkpoint] Expected {} more bytes at {} of '{}'{}, but it ends there. The file is truncated.",
        bytes.size(), offset, path_.string(), what.empty() ? "" : fmt::format(" ({})", what));
    bytes = bytes.subspan(static_cast<std::size_t>(got));
    offset += got;
  }
}

void File::write(Index offset, Bytes bytes, std::string_view what) const {
  while (!bytes.empty()) {
    const ssize_t put = ::pwrite(descriptor_, bytes.data(), std::min(bytes.size(), kMostAtOnce), offset);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("write", path_, what, errno, remedy_of(errno));
    bytes = bytes.subspan(static_cast<std::size_t>(put));
    offset += put;
  }
}

void File::sync_and_close() {
  if (::fsync(descriptor_) != 0) fail("write", path_, {}, errno, remedy_of(errno));
  // Some file systems report a full disk only now.
  if (::close(std::exchange(descriptor_, -1)) != 0) fail("write", path_, {}, errno, remedy_of(errno));
}

std::string read_file(const std::filesystem::path& path, Index limit) {
  const File file = File::open(path);
  const Index size = file.size();
  RAGGED_CHECKPOINT_CHECK(
      size <= limit, "[checkpoint] Expected a file of at most {} bytes, but got {} ('{}').", limit, size,
      path.string());
  std::string text(static_cast<std::size_t>(size), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

void write_file(const std::filesystem::path& path, std::string_view text) {
  File file = File::create(path);
  file.write(0, as_bytes(text));
  file.sync_and_close();
}

void sync_folder(const std::filesystem::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail("open", folder, {}, errno);
  const int result = ::fsync(descriptor);
  const int error = errno;
  ::close(descriptor);
  // Some network file systems know no fsync of folders; their renames are durable by themselves.
  if (result != 0 && error != EINVAL) fail("write", folder, {}, error, remedy_of(error));
}

void move(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    fail(fmt::format("rename '{}' to", from.string()), to, {}, errno, remedy_of(errno));
  }
}

}  // namespace ragged::checkpoint
