#include "ragged/train/data.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace ragged::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPythonStdlib = "python-stdlib";

// Mixes all bits of the input into all bits of the result (the finaliser of SplitMix64, Steele et
// al., OOPSLA 2014).
std::uint64_t mix(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

// The interpreter knows where its library lies; every distribution puts it elsewhere.
fs::path python_stdlib() {
  struct Close {
    void operator()(std::FILE* pipe) const { pclose(pipe); }
  };
  const std::unique_ptr<std::FILE, Close> pipe(
      popen("python3 -c \"import sysconfig; print(sysconfig.get_path('stdlib'))\" 2>/dev/null", "r"));
  std::string output;
  std::array<char, 512> chunk{};
  while (pipe && std::fgets(chunk.data(), static_cast<int>(chunk.size()), pipe.get())) {
    output += chunk.data();
  }
  while (!output.empty() && output.back() == '\n') output.pop_back();
  RAGGED_CHECK(
      !output.empty(),
      "[data] Expected python3 to say where its standard library is, but it didn't (data.path = "
      "\"{}\"). Install python3, or set data.path to a text file or folder.",
      kPythonStdlib);
  return output;
}

bool has_extension(const fs::path& path, const std::vector<std::string>& extensions) {
  return extensions.empty() || std::ranges::find(extensions, path.extension().string()) != extensions.end();
}

// Relative paths in bytewise order, which no locale changes.
std::vector<std::string> list_files(
    const fs::path& folder, const DataConfig& config, const std::set<std::string>& skipped) {
  std::vector<std::string> files;
  std::error_code error;
  auto options = fs::directory_options::skip_permission_denied;
  for (auto it = fs::recursive_directory_iterator(folder, options, error);
       !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    std::error_code entry_error;
    if (it->is_directory(entry_error) && skipped.contains(it->path().filename().string())) {
      it.disable_recursion_pending();
    } else if (it->is_regular_file(entry_error) && has_extension(it->path(), config.extensions)) {
      files.push_back(it->path().lexically_relative(folder).generic_string());
    }
  }
  RAGGED_CHECK(!error, "[data] Expected a readable folder, but '{}' gave: {}.", folder.string(), error.message());
  std::ranges::sort(files);
  return files;
}

// Appends up to `limit` bytes of the file.
void append_file(const fs::path& path, Index limit, std::string& out) {
  std::ifstream file(path, std::ios::binary);
  RAGGED_CHECK(file, "[data] Expected a readable file, but '{}' can't be opened.", path.string());
  std::array<char, 1 << 16> chunk{};
  while (limit > 0 && file) {
    file.read(chunk.data(), std::min<Index>(limit, static_cast<Index>(chunk.size())));
    out.append(chunk.data(), static_cast<std::size_t>(file.gcount()));
    limit -= file.gcount();
  }
}

at::Tensor to_tensor(const std::string& bytes) {
  at::Tensor tensor = at::empty({static_cast<Index>(bytes.size())}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

std::uint64_t fingerprint(const std::string& train, const std::string& validation) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  const auto add = [&hash](const std::string& bytes) {
    for (char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3ULL;
    hash = mix(hash ^ bytes.size());
  };
  add(train);
  add(validation);
  return hash;
}

Batch cut(const at::Tensor& text, Index sequence, const std::vector<Index>& offsets) {
  const auto count = static_cast<Index>(offsets.size());
  Batch batch;
  batch.tokens = at::empty({count, sequence}, at::kLong);
  batch.targets = at::empty({count, sequence}, at::kLong);
  const auto* bytes = text.const_data_ptr<std::uint8_t>();
  auto* tokens = batch.tokens.mutable_data_ptr<std::int64_t>();
  auto* targets = batch.targets.mutable_data_ptr<std::int64_t>();
  for (Index offset : offsets) {
    tokens = std::copy(bytes + offset, bytes + offset + sequence, tokens);
    targets = std::copy(bytes + offset + 1, bytes + offset + sequence + 1, targets);
  }
  return batch;
}

}  // namespace

TextData load_text(const DataConfig& config, Index sequence) {
  const bool stdlib = config.path == kPythonStdlib;
  const fs::path path = stdlib ? python_stdlib() : fs::path(config.path);
  std::error_code error;
  RAGGED_CHECK(
      fs::exists(path, error),
      "[data] Expected a text file or folder, but '{}' doesn't exist (key 'data.path'). Set it to "
      "one, or to \"{}\".",
      path.string(), kPythonStdlib);

  std::string train;
  std::string validation;
  TextData data;
  data.folder = path.string();
  if (fs::is_directory(path, error)) {
    std::set<std::string> skipped;
    if (stdlib) skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"};
    const std::vector<std::string> files = list_files(path, config, skipped);
    RAGGED_CHECK(
        !files.empty(), "[data] Expected files that end with one of data.extensions ({}), but '{}' has none.",
        fmt::join(config.extensions, ", "), path.string());
    Index left = config.max_bytes;
    for (const std::string& file : files) {
      if (left == 0) break;
      // The middle one of each run of files, so that a short list has one too.
      const bool held_out = data.files % config.holdout == config.holdout / 2;
      std::string& part = held_out ? validation : train;
      const std::size_t before = part.size();
      append_file(path / file, left, part);
      left -= static_cast<Index>(part.size() - before);
      ++data.files;
    }
  } else {
    append_file(path, config.max_bytes, train);
    const std::size_t kept = train.size() - train.size() / static_cast<std::size_t>(config.holdout);
    validation = train.substr(kept);
    train.resize(kept);
    data.files = 1;
  }

  const auto check_size = [&](const std::string& part, const char* purpose) {
    RAGGED_CHECK(
        static_cast<Index>(part.size()) > sequence,
        "[data] Expected more than {} bytes of text for {}, but '{}' gave {}. Point data.path at "
        "more text, or lower train.sequence.",
        sequence, purpose, path.string(), part.size());
  };
  check_size(train, "training");
  check_size(validation, "validation");
  data.train = to_tensor(train);
  data.validation = to_tensor(validation);
  data.fingerprint = fingerprint(train, validation);
  return data;
}

Index sample_offset(Index size, Index sequence, std::uint64_t seed, Index step, Index number) {
  const auto choices = static_cast<std::uint64_t>(size - sequence);
  std::uint64_t random = mix(seed);
  random = mix(random ^ static_cast<std::uint64_t>(step));
  random = mix(random ^ static_cast<std::uint64_t>(number));
  // The bias of a remainder is below choices / 2^64.
  return static_cast<Index>(random % choices);
}

Batch training_batch(const at::Tensor& text, Index sequence, std::uint64_t seed, const BatchPosition& position) {
  std::vector<Index> offsets;
  for (Index i = 0; i < position.count; ++i) {
    offsets.push_back(sample_offset(text.numel(), sequence, seed, position.step, position.first + i));
  }
  return cut(text, sequence, offsets);
}

Batch validation_batch(const at::Tensor& text, Index sequence, Index total, Index first, Index count) {
  const Index last_offset = text.numel() - sequence - 1;
  std::vector<Index> offsets;
  for (Index i = first; i < first + count; ++i) {
    offsets.push_back(total > 1 ? last_offset * (i % total) / (total - 1) : 0);
  }
  return cut(text, sequence, offsets);
}

}  // namespace ragged::train
