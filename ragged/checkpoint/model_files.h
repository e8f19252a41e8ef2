// Other people's models on disk: a folder with model.safetensors, or with several files and an index. Read by tensor
// and written one tensor after the other, so that a model needs no more memory than a part of a tensor. Knows names,
// shapes and bytes; not what they mean (train/hf_names.h), and not checkpoints of ours (read.h). No torch.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "ragged/checkpoint/safetensors_file.h"

namespace ragged::checkpoint {

inline constexpr const char* kModelFile = "model.safetensors";
inline constexpr const char* kModelIndexFile = "model.safetensors.index.json";

/// Tensors of a folder, by name. Headers are read and checked at once, values when they are asked for; reads of one
/// object may run in several threads.
class ModelFiles {
 public:
  /// model.safetensors where there is one, else what the index names; as transformers does. Throws CheckpointError that
  /// names file and tensor for a folder with neither, damaged or truncated files, a tensor that the index names and no
  /// file has, that a file has and the index doesn't name, or that lies in two files.
  static ModelFiles open(const std::filesystem::path& folder);

  const std::filesystem::path& folder() const { return folder_; }
  std::vector<std::string> names() const;  // sorted
  /// Null where there is none of this name.
  const plan::SafetensorsEntry* find(const std::string& name) const;
  /// The file that holds it; there must be one.
  const std::filesystem::path& file_of(const std::string& name) const;
  /// `bytes` of the tensor from `offset` on. Throws CheckpointError that names file and tensor.
  void read(const std::string& name, Index offset, std::span<std::byte> bytes) const;
  /// Of all tensors.
  Index bytes() const;

 private:
  struct Place {
    std::size_t file = 0;
    const plan::SafetensorsEntry* entry = nullptr;
  };
  ModelFiles() = default;
  void add(const std::filesystem::path& path);
  const Place& place(const std::string& name) const;

  std::filesystem::path folder_;
  std::vector<SafetensorsReader> files_;
  std::vector<std::filesystem::path> paths_;
  std::map<std::string, Place> places_;
};

/// Takes the bytes of a tensor from its first to its last, in parts of any size.
using TakeBytes = std::function<void(Bytes bytes)>;
/// Hands over tensor number `tensor`. Called once a tensor, in the order of the files.
using GiveTensor = std::function<void(std::size_t tensor, const TakeBytes& take)>;

struct ModelFilesOptions {
  /// A file is closed before it would hold more bytes of tensors than this; one tensor always fits.
  Index max_file_bytes = Index{5'000'000'000};
};

/// Names of the files that were written.
struct WrittenModel {
  std::vector<std::string> files{};
  Index bytes = 0;  // of tensors
};

/// Writes tensors (names, dtypes and shapes of `tensors`) into `folder`, which exists: one model.safetensors, or
/// model-00001-of-000NN.safetensors and an index. All is synced, the folder apart. Throws CheckpointError where that
/// can't be, InvalidArgument for names that occur twice, and InternalError where `give` hands over too much or little.
WrittenModel write_model_files(
    const std::filesystem::path& folder, std::vector<plan::SafetensorsEntry> tensors, const GiveTensor& give,
    const ModelFilesOptions& options = {});

/// A folder that appears whole or not at all: written under another name beside it (".tmp-NAME"), then renamed. What a
/// killed process left under that name is swept away by the next.
class NewFolder {
 public:
  /// Makes the temporary folder. Throws CheckpointError where `path` exists already, unless as an empty folder: nothing
  /// is ever overwritten; and where another process is writing it.
  explicit NewFolder(const std::filesystem::path& path);
  /// Drops what wasn't published.
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const std::filesystem::path& temporary() const { return temporary_; }
  /// Files in it are synced already. Throws CheckpointError.
  void publish();

 private:
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int lock_ = -1;  // descriptor of the temporary folder
  bool is_published_ = false;
};

}  // namespace ragged::checkpoint
