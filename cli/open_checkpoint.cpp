#include "open_checkpoint.h"

#include <filesystem>
#include <system_error>

#include "ragged/checkpoint/publish.h"

namespace ragged::cli {

checkpoint::Checkpoint open_checkpoint(const std::string& folder) {
  std::error_code error;
  if (!std::filesystem::exists(std::filesystem::path(folder) / checkpoint::kIndexFile, error)) {
    const auto newest = checkpoint::CheckpointFolders(folder).newest_complete();
    if (newest) return checkpoint::Checkpoint::open(*newest);
  }
  return checkpoint::Checkpoint::open(folder);
}

}  // namespace ragged::cli
