#include "ragged/train/hf_export.h"

#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ragged/checkpoint/check.h"
#include "ragged/checkpoint/elements.h"
#include "ragged/checkpoint/format.h"
#include "ragged/train/hf_config.h"
#include "ragged/train/hf_weights.h"

namespace ragged::train {
namespace {

namespace fs = std::filesystem;
using checkpoint::Checkpoint;
using checkpoint::TensorInfo;

constexpr const char* kConfigFact = "config";
// What a tokenizer of transformers may consist of.
constexpr const char* kTokenizerFiles[] = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt"};

Config saved_config(const Checkpoint& checkpoint) {
  const auto found = checkpoint.index().facts.texts.find(kConfigFact);
  RAGGED_CHECKPOINT_CHECK(
      found != checkpoint.index().facts.texts.end(),
      "[export] Expected a checkpoint of `ragged train`, but '{}' holds no config. Models of your own go out by "
      "their own names: torch.distributed.checkpoint reads the folder.",
      checkpoint.folder().string());
  return parse_config(found->second, checkpoint.folder().string());
}

// All of the model, in the shapes that the names are made for, and nothing else but optimizer states.
void check_tensors(const Checkpoint& checkpoint, const HfNames& names) {
  std::set<std::string> wanted;
  for (const NamedShape& ours : names.ours) {
    wanted.insert(ours.name);
    const TensorInfo* info = checkpoint.find(ours.name);
    RAGGED_CHECKPOINT_CHECK(
        info && info->shape == ours.shape && checkpoint::has_float_elements(info->dtype),
        "[export] Expected a tensor '{}' of shape [{}] as F32, BF16 or F16, as the config in '{}' says, but got {}.",
        ours.name, fmt::join(ours.shape, ", "), checkpoint.folder().string(),
        info ? fmt::format("[{}] as {}", fmt::join(info->shape, ", "), info->dtype) : "none");
  }
  for (const TensorInfo& info : checkpoint.index().tensors) {
    RAGGED_CHECKPOINT_CHECK(
        wanted.contains(info.name) || info.name.starts_with("state."),
        "[export] Expected only tensors of the model that the config in '{}' describes, but got '{}'.",
        checkpoint.folder().string(), info.name);
  }
}

std::string chosen_dtype(const std::string& option, const std::string& saved) {
  if (option == "keep") return saved;
  if (option == "fp32") return "F32";
  RAGGED_CHECK(option == "bf16", "[export] Expected keep, fp32 or bf16, but got '{}' (option --dtype).", option);
  return "BF16";
}

// Values of a flat interval of one tensor, every chunk of the file checked.
std::vector<float> read_values(const Checkpoint& checkpoint, const TensorInfo& info, layout::Interval part) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(part.size() * checkpoint::dtype_bytes(info.dtype)));
  checkpoint::ReadPiece piece;
  piece.name = info.name;
  piece.dtype = info.dtype;
  piece.shape = info.shape;
  piece.format = info.format;
  piece.owned = part;
  const checkpoint::ReadPlan plan(checkpoint, {std::move(piece)}, /*allow_unused=*/true);
  plan.read([&](std::size_t, Index offset, checkpoint::Bytes source) {
    std::memcpy(bytes.data() + offset, source.data(), source.size());
  });
  std::vector<float> values(static_cast<std::size_t>(part.size()));
  checkpoint::decode_elements(info.dtype, bytes, values);
  return values;
}

void give_tensor(
    const Checkpoint& checkpoint, const HfTensor& tensor, const std::string& dtype, const checkpoint::TakeBytes& take) {
  std::vector<float> ours;
  std::vector<float> theirs;
  std::vector<std::byte> bytes;
  for (const Slab& slab : slabs(tensor)) {
    if (!tensor.ours.empty()) {
      ours = read_values(checkpoint, *checkpoint.find(tensor.ours), {slab.ours, slab.ours + slab.count});
    }
    theirs.resize(static_cast<std::size_t>(slab.count));
    to_theirs(tensor, ours, theirs);
    bytes.resize(theirs.size() * static_cast<std::size_t>(checkpoint::dtype_bytes(dtype)));
    checkpoint::encode_elements(dtype, theirs, bytes);
    take(bytes);
  }
}

void write_tokenizer(const fs::path& folder, const fs::path& source) {
  if (source.empty()) {
    checkpoint::write_file(folder / "tokenizer.json", byte_tokenizer_json());
    checkpoint::write_file(folder / "tokenizer_config.json", byte_tokenizer_config_json());
    return;
  }
  constexpr Index kMost = Index{1} << 30;
  bool has_some = false;
  for (const char* name : kTokenizerFiles) {
    std::error_code error;
    if (!fs::is_regular_file(source / name, error)) continue;
    checkpoint::write_file(folder / name, checkpoint::read_file(source / name, kMost));
    has_some = true;
  }
  RAGGED_CHECK(
      has_some,
      "[export] Expected a folder with files of a tokenizer, such as tokenizer.json, but '{}' has none "
      "(option --tokenizer).",
      source.string());
}

}  // namespace

HfExportReport export_to_hf(const Checkpoint& checkpoint, const fs::path& out, const HfExportOptions& options) {
  const Config config = saved_config(checkpoint);
  const HfNames names = hf_names(config.model);
  check_tensors(checkpoint, names);

  HfExportReport report;
  report.architecture = names.architecture;
  report.tensors = static_cast<Index>(names.theirs.size());
  report.dtype = chosen_dtype(options.dtype, checkpoint.find(names.ours.front().name)->dtype);
  std::vector<plan::SafetensorsEntry> entries;
  for (const HfTensor& tensor : names.theirs) {
    const std::string saved = tensor.ours.empty() ? report.dtype : checkpoint.find(tensor.ours)->dtype;
    entries.push_back({.name = tensor.name, .dtype = chosen_dtype(options.dtype, saved), .shape = tensor.shape});
  }

  checkpoint::NewFolder folder(out);
  write_tokenizer(folder.temporary(), options.tokenizer);
  checkpoint::write_file(
      folder.temporary() / "config.json", hf_config_json(config.model, report.dtype, config.train.sequence));
  checkpoint::write_file(folder.temporary() / "generation_config.json", hf_generation_config_json());
  const checkpoint::WrittenModel written = checkpoint::write_model_files(
      folder.temporary(), entries,
      [&](std::size_t i, const checkpoint::TakeBytes& take) {
        give_tensor(checkpoint, names.theirs[i], entries[i].dtype, take);
      },
      options.files);
  folder.publish();
  report.files = written.files;
  report.bytes = written.bytes;
  return report;
}

std::string import_config(const HfWeights& weights) {
  Config config;
  config.model = weights.config();
  config.model.from = fs::absolute(weights.files().folder()).lexically_normal().string();
  const std::string all = to_toml(config);
  const std::size_t end = all.find("\n[");  // of the first section
  RAGGED_ASSERT(all.starts_with("[model]\n") && end != std::string::npos, "sections in another order");
  return fmt::format(
      "# Starts from the weights of a {}. Every other key has its default; `ragged train --help` lists them.\n\n{}",
      weights.names().architecture, all.substr(0, end));
}

}  // namespace ragged::train
