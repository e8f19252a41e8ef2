#include "output.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "ragged/base/error.h"

namespace ragged::cli {

void print(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

void write_file(const std::string& path, std::string_view text) {
  const std::string temporary = path + ".tmp";
  std::error_code error;
  {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    file << text;
    file.flush();
    RAGGED_CHECK(file, "[output] Expected to write '{}', but couldn't. Is the folder there and writable?", path);
  }
  std::filesystem::rename(temporary, path, error);
  if (!error) return;
  std::error_code ignored;
  std::filesystem::remove(temporary, ignored);
  RAGGED_CHECK(false, "[output] Expected to write '{}', but got: {}.", path, error.message());
}

}  // namespace ragged::cli
