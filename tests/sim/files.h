// Small files for tests: a folder that goes away, and safetensors files without weights.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include <unistd.h>

namespace ragged::testing {

/// A folder of its own, removed at the end.
class TempFolder {
 public:
  TempFolder() {
    static std::atomic<int> count = 0;
    folder_ = std::filesystem::temp_directory_path() /
        ("ragged_sim_" + std::to_string(getpid()) + "_" + std::to_string(count++));
    std::filesystem::create_directories(folder_);
  }
  ~TempFolder() {
    std::error_code error;
    std::filesystem::remove_all(folder_, error);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::filesystem::path path(const std::string& name) const { return folder_ / name; }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
  }

 private:
  std::filesystem::path folder_;
};

/// A file with this header and so many bytes behind it.
inline std::string safetensors_file(const std::string& header, std::size_t data_bytes) {
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>((std::uint64_t{header.size()} >> (8 * i)) & 0xff);
  return file + header + std::string(data_bytes, '\0');
}

}  // namespace ragged::testing
