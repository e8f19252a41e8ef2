#include "ragged/train/hf_load.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ragged/base/error.h"
#include "ragged/checkpoint/agree.h"
#include "ragged/train/hf_config.h"
#include "ragged/train/hf_weights.h"
#include "ragged/train/metrics.h"

namespace ragged::train {
namespace {

void check_same(const ModelConfig& config, const HfWeights& weights) {
  const std::vector<std::string> differences = model_differences(config, weights.config());
  RAGGED_CHECK(
      differences.empty(),
      "[import] Expected [model] to describe the weights in '{}', but they differ in {} (key 'model.from'). `ragged "
      "import {} new.toml` writes a config that fits.",
      config.from, fmt::join(differences, ", "), config.from);
}

// Every parameter is one that the table of names has, in its shape.
void check_names(const HfWeights& weights, const std::vector<buffer::ShardedTensor>& parameters) {
  const std::vector<NamedShape>& known = weights.names().ours;
  RAGGED_ASSERT(
      known.size() == parameters.size(), "{} parameters where {} were expected", parameters.size(), known.size());
  for (const buffer::ShardedTensor& parameter : parameters) {
    RAGGED_ASSERT(
        std::ranges::find(known, NamedShape{parameter.name, parameter.shape}) != known.end(),
        "parameter '{}' isn't in the table of names", parameter.name);
  }
}

}  // namespace

std::string load_hf_weights(
    const comm::Communicator& all, const ModelConfig& config, const std::vector<buffer::ShardedTensor>& parameters) {
  const auto start = std::chrono::steady_clock::now();
  const at::NoGradGuard no_grad;
  std::optional<HfWeights> weights;
  checkpoint::agree(all, [&] {
    weights = HfWeights::open(config.from);
    check_same(config, *weights);
    check_names(*weights, parameters);
  });
  checkpoint::agree(all, [&] {
    for (const buffer::ShardedTensor& parameter : parameters) {
      const at::Tensor local = parameter.local.detach();
      weights->read(parameter.name, parameter.owned, [&](Index offset, std::span<const float> values) {
        const auto count = static_cast<Index>(values.size());
        // from_blob takes no const; nothing writes to it.
        const at::Tensor source = at::from_blob(const_cast<float*>(values.data()), {count}, at::kFloat);
        local.narrow(0, offset, count).copy_(source);
      });
    }
  });
  return fmt::format(
      "weights of '{}' ({}, {}) read in {:.2f} s", config.from, weights->names().architecture,
      format_bytes(weights->files().bytes()),
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

}  // namespace ragged::train
