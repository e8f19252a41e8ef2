#include "ragged/train/language_model.h"

#include <set>

#include <ATen/ATen.h>

#include "ragged/base/error.h"
#include "ragged/fsdp/deferred.h"
#include "ragged/train/llama.h"
#include "ragged/train/moe.h"

namespace ragged::train {

MakeParameter parameters_on(c10::Device device) {
  return [device](at::IntArrayRef sizes) {
    return at::empty(sizes, at::TensorOptions().dtype(at::kFloat).device(device));
  };
}

MakeParameter deferred_parameters(c10::Device device) {
  return [device](at::IntArrayRef sizes) { return fsdp::deferred_parameter(sizes, at::kFloat, device); };
}

std::shared_ptr<LanguageModel> make_model(const ModelConfig& config, const MakeParameter& make) {
  if (config.kind == "llama") return std::make_shared<Llama>(config, make);
  RAGGED_CHECK(config.kind == "moe", "[model] Expected kind llama or moe, but got '{}'.", config.kind);
  return std::make_shared<MoeDecoder>(config, make);
}

at::Tensor mean_cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits.to(at::kFloat).flatten(0, -2), targets.flatten());
}

Index parameter_count(const torch::nn::Module& module) {
  Index count = 0;
  std::set<const c10::TensorImpl*> seen;
  for (const at::Tensor& parameter : module.parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) count += parameter.numel();
  }
  return count;
}

}  // namespace ragged::train
