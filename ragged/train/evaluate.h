// What a model knows, without training it: its loss on held-out text, and text of its own. Both run forward on all
// ranks together, so all ranks must call them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "ragged/comm/world.h"
#include "ragged/fsdp/unit.h"
#include "ragged/train/language_model.h"

namespace ragged::train {

struct ValidationOptions {
  Index sequences = 64;  // over all ranks, spread evenly over the text
  Index sequence = 128;
  Index batch = 4;  // sequences in one forward of a rank
};

/// Mean cross-entropy in nats per token, the same number on all ranks; which sequences count doesn't depend on the
/// number of ranks. Collective.
double validation_loss(
    const comm::World& world, fsdp::Unit& root, LanguageModel& model, const at::Tensor& text,
    const ValidationOptions& options);

struct SampleOptions {
  Index bytes = 240;
  Index context = 128;       // bytes that the model sees at most
  double temperature = 0.7;  // 0: the likeliest byte
  std::uint64_t seed = 1;
};

/// The prompt, continued byte by byte. Keeps the gathered parameters from one byte to the next, so it needs the memory
/// of the whole model. Collective.
std::string generate(
    fsdp::Unit& root, LanguageModel& model, c10::Device device, std::string_view prompt, const SampleOptions& options);

/// For a terminal: what isn't printable ASCII or a line break shows as '?'.
std::string printable(std::string_view text);

}  // namespace ragged::train
