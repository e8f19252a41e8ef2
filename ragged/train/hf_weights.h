// Weights of a Hugging Face model as values of our parameters: opened and checked as a whole, then read by any part of
// a parameter, so that a rank needs no more than its own shard and one matrix. No torch; hf_load.h fills shards.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "ragged/checkpoint/model_files.h"
#include "ragged/layout/interval.h"
#include "ragged/train/hf_names.h"

namespace ragged::train {

/// Values from `offset` on, of an interval that was asked for. In any order, each once.
using StoreValues = std::function<void(Index offset, std::span<const float> values)>;

class HfWeights {
 public:
  /// Reads config.json and the headers of all weights. Throws InvalidArgument for a model that ours can't be
  /// (model_config_from_hf), CheckpointError that names file, tensor, what was expected and what came for missing
  /// files, missing, unknown, misshapen and unreadable tensors.
  static HfWeights open(const std::filesystem::path& folder);

  const ModelConfig& config() const { return config_; }  // without `from`
  const HfNames& names() const { return names_; }
  const checkpoint::ModelFiles& files() const { return files_; }
  /// Tensors in the files that no one needs: a tied head, tables of rotary positions.
  const std::vector<std::string>& unused() const { return unused_; }

  /// The flat interval `owned` of our parameter `ours`, in fp32. Reads only what it needs of tensors in our order, and
  /// whole experts of others. Throws CheckpointError that names file and tensor.
  void read(const std::string& ours, layout::Interval owned, const StoreValues& store) const;

 private:
  HfWeights(checkpoint::ModelFiles files, ModelConfig config);
  void check() const;
  void check_sinks() const;
  void find_unused();
  void read_slab(const HfTensor& tensor, const Slab& slab, layout::Interval owned, const StoreValues& store) const;
  std::vector<float> values(const HfTensor& tensor, Index first, Index count) const;

  checkpoint::ModelFiles files_;
  ModelConfig config_;
  HfNames names_;
  std::map<std::string, std::vector<std::size_t>> sources_;  // of ours: numbers of theirs
  std::vector<std::string> unused_;
};

}  // namespace ragged::train
