// libFuzzer on the reader of other people's config.json: any text is a valid [model] or an InvalidArgument, and what is
// written of it reads back the same. tools/fuzz runs it.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "ragged/base/error.h"
#include "ragged/train/config_keys.h"
#include "ragged/train/hf_config.h"
#include "ragged/train/hf_names.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ragged;  // NOLINT: the subject
  train::ModelConfig model;
  try {
    model = train::model_config_from_hf({reinterpret_cast<const char*>(data), size}, "fuzz");
  } catch (const InvalidArgument&) {
    return 0;
  }
  train::Config config;
  config.model = model;
  train::validate(config);                           // throws, and so ends the process, where it isn't valid
  if (model.layers * model.experts > 500) return 0;  // slow and no fault
  if (train::hf_names(model).ours.empty()) __builtin_trap();
  if (train::model_config_from_hf(train::hf_config_json(model, "F32", 1), "again") != model) __builtin_trap();
  return 0;
}
