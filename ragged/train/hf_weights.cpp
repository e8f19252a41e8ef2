#include "ragged/train/hf_weights.h"

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ragged/checkpoint/check.h"
#include "ragged/checkpoint/elements.h"
#include "ragged/checkpoint/format.h"
#include "ragged/train/hf_config.h"

namespace ragged::train {
namespace {

namespace fs = std::filesystem;

constexpr Index kMaxConfig = Index{16} << 20;

ModelConfig read_config(const fs::path& folder) {
  const fs::path path = folder / "config.json";
  std::error_code error;
  RAGGED_CHECKPOINT_CHECK(
      fs::is_regular_file(path, error),
      "[import] Expected the folder of a Hugging Face model, but there is no file '{}'. Give the folder that holds "
      "config.json and the .safetensors files.",
      path.string());
  return model_config_from_hf(checkpoint::read_file(path, kMaxConfig), path.string());
}

std::string shape_text(const std::vector<Index>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

bool is_rotary_table(const std::string& name) {
  return name.ends_with(".rotary_emb.inv_freq");
}

}  // namespace

HfWeights HfWeights::open(const fs::path& folder) {
  ModelConfig config = read_config(folder);
  HfWeights weights(checkpoint::ModelFiles::open(folder), std::move(config));
  weights.check();
  weights.find_unused();
  weights.check_sinks();
  return weights;
}

HfWeights::HfWeights(checkpoint::ModelFiles files, ModelConfig config)
    : files_(std::move(files)), config_(std::move(config)), names_(hf_names(config_)) {
  for (std::size_t i = 0; i < names_.theirs.size(); ++i) sources_[names_.theirs[i].ours].push_back(i);
}

void HfWeights::check() const {
  for (const HfTensor& tensor : names_.theirs) {
    const plan::SafetensorsEntry* entry = files_.find(tensor.name);
    RAGGED_CHECKPOINT_CHECK(
        entry,
        "[import] Expected a tensor '{}', as config.json says, but no file in '{}' has it. Is the folder complete?",
        tensor.name, files_.folder().string());
    RAGGED_CHECKPOINT_CHECK(
        entry->shape == tensor.shape,
        "[import] Expected tensor '{}' of shape {}, as config.json says, but got {} ('{}'). Weights and config belong "
        "to different models.",
        tensor.name, shape_text(tensor.shape), shape_text(entry->shape), files_.file_of(tensor.name).string());
    RAGGED_CHECKPOINT_CHECK(
        checkpoint::has_float_elements(entry->dtype),
        "[import] Expected tensor '{}' as F32, BF16 or F16, but got {} ('{}'). Save the model in one of these first.",
        tensor.name, entry->dtype, files_.file_of(tensor.name).string());
  }
}

void HfWeights::find_unused() {
  std::set<std::string> wanted;
  for (const HfTensor& tensor : names_.theirs) wanted.insert(tensor.name);
  for (const std::string& name : files_.names()) {
    if (wanted.contains(name)) continue;
    const bool is_tied_head = config_.tied_embeddings && name == "lm_head.weight";
    RAGGED_CHECKPOINT_CHECK(
        is_tied_head || is_rotary_table(name),
        "[import] Expected only tensors of a {}, but got '{}' ('{}'). The model has parts that ours hasn't, so its "
        "weights would compute something else here.",
        names_.architecture, name, files_.file_of(name).string());
    unused_.push_back(name);
  }
}

// Where we have nothing of the kind, theirs must do nothing.
void HfWeights::check_sinks() const {
  for (const HfTensor& tensor : names_.theirs) {
    if (!tensor.ours.empty()) continue;
    const std::vector<float> found = values(tensor, 0, checked_product(tensor.shape));
    const float largest = *std::ranges::max_element(found);
    RAGGED_CHECKPOINT_CHECK(
        largest <= kMostNoSink,
        "[import] Expected values of at most {:g} in '{}', which do nothing, but got {:g} ('{}'). Attention here has "
        "no sinks, so the weights would compute something else.",
        kMostNoSink, tensor.name, largest, files_.file_of(tensor.name).string());
  }
}

std::vector<float> HfWeights::values(const HfTensor& tensor, Index first, Index count) const {
  const std::string& dtype = files_.find(tensor.name)->dtype;
  const Index item = checkpoint::dtype_bytes(dtype);
  std::vector<std::byte> bytes(static_cast<std::size_t>(count * item));
  files_.read(tensor.name, first * item, bytes);
  std::vector<float> values(static_cast<std::size_t>(count));
  checkpoint::decode_elements(dtype, bytes, values);
  return values;
}

void HfWeights::read(const std::string& ours, layout::Interval owned, const StoreValues& store) const {
  const auto found = sources_.find(ours);
  RAGGED_ASSERT(found != sources_.end(), "no parameter '{}' in a {}", ours, names_.architecture);
  if (owned.empty()) return;
  for (const std::size_t i : found->second) {
    for (const Slab& slab : slabs(names_.theirs[i])) read_slab(names_.theirs[i], slab, owned, store);
  }
}

void HfWeights::read_slab(
    const HfTensor& tensor, const Slab& slab, layout::Interval owned, const StoreValues& store) const {
  const layout::Interval part = layout::intersect(owned, {slab.ours, slab.ours + slab.count});
  if (part.empty()) return;
  const Index skipped = part.begin - slab.ours;
  if (is_contiguous(tensor)) {
    store(part.begin - owned.begin, values(tensor, slab.theirs + skipped, part.size()));
    return;
  }
  const std::vector<float> theirs = values(tensor, slab.theirs, slab.count);
  std::vector<float> whole(theirs.size());
  to_ours(tensor, theirs, whole);
  store(
      part.begin - owned.begin,
      std::span<const float>(whole).subspan(static_cast<std::size_t>(skipped), static_cast<std::size_t>(part.size())));
}

}  // namespace ragged::train
