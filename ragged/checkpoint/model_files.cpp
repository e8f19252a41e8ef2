#include "ragged/checkpoint/model_files.h"

#include <algorithm>
#include <cerrno>
#include <set>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include "ragged/checkpoint/check.h"
#include "ragged/plan/safetensors_index.h"

namespace ragged::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr Index kMaxIndex = Index{256} << 20;
// transformers refuses files that don't say which framework's layout they have.
const std::map<std::string, std::string> kMetadata = {{"format", "pt"}};

std::map<std::string, std::string> read_index(const fs::path& path) {
  try {
    return plan::parse_safetensors_index(read_file(path, kMaxIndex), path.string());
  } catch (const InvalidArgument& error) {
    throw CheckpointError(error.what());
  }
}

[[noreturn]] void refuse_folder(const fs::path& folder) {
  std::error_code error;
  const bool is_pickled =
      fs::exists(folder / "pytorch_model.bin", error) || fs::exists(folder / "pytorch_model.bin.index.json", error);
  throw CheckpointError(fmt::format(
      "[model] Expected '{}' or '{}' in the folder '{}', but got neither.{}", kModelFile, kModelIndexFile,
      folder.string(),
      is_pickled ? " Its weights are pickled; save them with transformers' save_pretrained, which writes safetensors."
                 : " Is it the folder of a model, and all of it?"));
}

}  // namespace

// --- reading ---

ModelFiles ModelFiles::open(const fs::path& folder) {
  ModelFiles model;
  model.folder_ = folder;
  std::error_code error;
  if (fs::exists(folder / kModelFile, error)) {
    model.add(folder / kModelFile);
    return model;
  }
  const fs::path index = folder / kModelIndexFile;
  if (!fs::exists(index, error)) refuse_folder(folder);
  const std::map<std::string, std::string> wanted = read_index(index);
  std::set<std::string> files;
  for (const auto& [name, file] : wanted) files.insert(file);
  for (const std::string& file : files) model.add(folder / file);
  for (const auto& [name, file] : wanted) {
    RAGGED_CHECKPOINT_CHECK(
        model.find(name) && model.file_of(name) == folder / file,
        "[model] Expected tensor '{}' in '{}', where the index '{}' has it, but it isn't there. Fetch the folder "
        "again; "
        "its files don't belong together.",
        name, (folder / file).string(), index.string());
  }
  for (const auto& [name, place] : model.places_) {
    RAGGED_CHECKPOINT_CHECK(
        wanted.contains(name),
        "[model] Expected the index '{}' to name every tensor, but it lacks '{}' of '{}'. Fetch the folder again; its "
        "files don't belong together.",
        index.string(), name, model.paths_[place.file].string());
  }
  return model;
}

void ModelFiles::add(const fs::path& path) {
  files_.emplace_back(path);
  paths_.push_back(path);
  const std::size_t file = files_.size() - 1;
  for (const plan::SafetensorsEntry& entry : files_.back().tensors()) {
    const auto [place, is_new] = places_.insert({entry.name, {file, &entry}});
    RAGGED_CHECKPOINT_CHECK(
        is_new, "[model] Expected each tensor in one file, but '{}' lies in '{}' and in '{}'.", entry.name,
        paths_[place->second.file].string(), path.string());
  }
}

std::vector<std::string> ModelFiles::names() const {
  std::vector<std::string> names;
  for (const auto& [name, place] : places_) names.push_back(name);
  return names;
}

const plan::SafetensorsEntry* ModelFiles::find(const std::string& name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? nullptr : found->second.entry;
}

const ModelFiles::Place& ModelFiles::place(const std::string& name) const {
  const auto found = places_.find(name);
  RAGGED_ASSERT(found != places_.end(), "no tensor '{}' in '{}'", name, folder_.string());
  return found->second;
}

const fs::path& ModelFiles::file_of(const std::string& name) const {
  return paths_[place(name).file];
}

void ModelFiles::read(const std::string& name, Index offset, std::span<std::byte> bytes) const {
  const Place& found = place(name);
  files_[found.file].read(*found.entry, offset, bytes);
}

Index ModelFiles::bytes() const {
  Index bytes = 0;
  for (const auto& [name, place] : places_) bytes += place.entry->end - place.entry->begin;
  return bytes;
}

// --- writing ---

namespace {

Index bytes_of(const plan::SafetensorsEntry& tensor) {
  const Index bits = plan::safetensors_bits(tensor.dtype);
  RAGGED_CHECK(
      bits > 0 && bits % 8 == 0, "[model] Expected a dtype of whole bytes, but got '{}' (tensor '{}').", tensor.dtype,
      tensor.name);
  return checked_product(tensor.shape) * (bits / 8);
}

// Tensor numbers of each file, in the given order.
std::vector<std::vector<std::size_t>> deal_out(const std::vector<plan::SafetensorsEntry>& tensors, Index max_bytes) {
  std::vector<std::vector<std::size_t>> files(1);
  std::set<std::string> names;
  Index filled = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    RAGGED_CHECK(
        names.insert(tensors[i].name).second, "[model] Expected tensors of different names, but got '{}' twice.",
        tensors[i].name);
    const Index bytes = bytes_of(tensors[i]);
    if (!files.back().empty() && bytes > max_bytes - filled) {
      files.emplace_back();
      filled = 0;
    }
    files.back().push_back(i);
    filled += bytes;
  }
  return files;
}

void write_one(
    const fs::path& path, const std::vector<plan::SafetensorsEntry>& tensors, const std::vector<std::size_t>& numbers,
    const GiveTensor& give) {
  std::vector<plan::SafetensorsEntry> entries;
  std::map<std::string, std::size_t> number_of;
  for (const std::size_t number : numbers) {
    entries.push_back(tensors[number]);
    number_of[tensors[number].name] = number;
  }
  SafetensorsWriter writer(path, lay_out(std::move(entries)), kMetadata);
  for (std::size_t k = 0; k < writer.tensors().size(); ++k) {
    const plan::SafetensorsEntry& entry = writer.tensors()[k];
    Index written = 0;
    give(number_of.at(entry.name), [&](Bytes bytes) {
      writer.write_part(k, written, bytes);
      written += static_cast<Index>(bytes.size());
    });
    RAGGED_ASSERT(
        written == entry.end - entry.begin, "{} of {} bytes of '{}'", written, entry.end - entry.begin, entry.name);
  }
  writer.finish();
}

}  // namespace

WrittenModel write_model_files(
    const fs::path& folder, std::vector<plan::SafetensorsEntry> tensors, const GiveTensor& give,
    const ModelFilesOptions& options) {
  RAGGED_CHECK(
      options.max_file_bytes > 0, "[model] Expected files of at least 1 byte, but got {} (param 'max_file_bytes').",
      options.max_file_bytes);
  const auto files = deal_out(tensors, options.max_file_bytes);
  WrittenModel written;
  std::map<std::string, std::string> index;
  for (std::size_t f = 0; f < files.size(); ++f) {
    written.files.push_back(
        files.size() == 1 ? kModelFile : fmt::format("model-{:05}-of-{:05}.safetensors", f + 1, files.size()));
    for (const std::size_t i : files[f]) {
      index[tensors[i].name] = written.files.back();
      written.bytes += bytes_of(tensors[i]);
    }
    write_one(folder / written.files.back(), tensors, files[f], give);
  }
  if (files.size() > 1) write_file(folder / kModelIndexFile, plan::write_safetensors_index(index, written.bytes));
  return written;
}

// --- publishing ---

NewFolder::NewFolder(const fs::path& path) : path_(path) {
  if (!path_.has_filename()) path_ = path_.parent_path();  // "out/"
  std::error_code error;
  const bool is_free = !fs::exists(path_, error) || (fs::is_directory(path_, error) && fs::is_empty(path_, error));
  RAGGED_CHECKPOINT_CHECK(
      is_free && !error,
      "[model] Expected a folder that doesn't exist yet, but '{}' does. Nothing is overwritten: remove it, or choose "
      "another name.",
      path_.string());
  const fs::path parent = path_.has_parent_path() ? path_.parent_path() : fs::path(".");
  temporary_ = parent / fmt::format(".tmp-{}", path_.filename().string());
  fs::create_directories(temporary_, error);
  RAGGED_CHECKPOINT_CHECK(
      !error, "[model] Expected to make the folder '{}', but got: {}. Choose a folder that can be written.",
      temporary_.string(), error.message());
  lock_ = ::open(temporary_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // Where a file system knows no locks there is none.
  const bool is_taken = lock_ >= 0 && ::flock(lock_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  if (is_taken) ::close(std::exchange(lock_, -1));
  RAGGED_CHECKPOINT_CHECK(
      !is_taken,
      "[model] Expected to write '{}' alone, but another process is at it. Wait for it, or choose another "
      "name.",
      path_.string());
  for (const fs::directory_entry& left : fs::directory_iterator(temporary_, error)) fs::remove_all(left.path(), error);
}

NewFolder::~NewFolder() {
  std::error_code ignored;
  if (!is_published_) fs::remove_all(temporary_, ignored);
  if (lock_ >= 0) ::close(lock_);
}

void NewFolder::publish() {
  sync_folder(temporary_);
  move(temporary_, path_);  // fails where somebody has filled it meanwhile
  is_published_ = true;
  sync_folder(temporary_.parent_path());
}

}  // namespace ragged::checkpoint
