// How our models are called and laid out as models of Hugging Face transformers: a table of their tensors, each a view
// of one of ours. Plain data and index mathematics over fp32 values; no files, no torch.
//
// [Note: their architectures]
//     kind llama                  LlamaForCausalLM    equal names below "model."
//     kind moe, expert_biases     GptOssForCausalLM   transposed and interleaved stacks, see below
//     kind moe, no expert_biases  MixtralForCausalLM  a stack is cut into its experts, gates and ups into w1 and w3
// All three are the same function of the same numbers as ours. GPT-OSS has more than ours: its experts compute
// (up + 1) * gate * sigmoid(alpha * gate) with both clamped, and its attention divides by exp(sink) more. With
// alpha = 1, no limit, up biases less by 1, and sinks so low that their exponential is 0, what is left is ours; the
// configuration that we write says so (hf_config.h). The subtraction rounds: biases come back within 2^-24 in fp32.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "ragged/base/math.h"
#include "ragged/train/config.h"

namespace ragged::train {

/// A sink whose exponential is 0 beside any score; what we read counts as none from kMostNoSink down.
inline constexpr float kNoSink = -1e30F;
inline constexpr float kMostNoSink = -1e9F;

struct NamedShape {
  std::string name{};
  std::vector<Index> shape{};
  friend bool operator==(const NamedShape&, const NamedShape&) = default;
};

/// A tensor of theirs. Its elements, in row-major order of `dims` (as many elements as `shape` has, dims split where
/// the order needs it), are ours at base + sum(i[d] * strides[d]), flat.
struct HfTensor {
  std::string name{};
  std::vector<Index> shape{};
  std::string ours{};  // empty: we have nothing of the kind, and every element is `constant`
  Index base = 0;
  std::vector<Index> dims{};
  std::vector<Index> strides{};
  float constant = 0.0F;
  float odd_offset = 0.0F;  // theirs less ours, at odd places of the last dim
};

struct HfNames {
  std::string architecture{};
  std::vector<NamedShape> ours{};  // every parameter, in model order, tied ones once
  std::vector<HfTensor> theirs{};
};

/// Names and shapes for a valid config.
HfNames hf_names(const ModelConfig& config);

/// A part of a tensor of theirs that is contiguous there and in ours, in another order.
struct Slab {
  Index theirs = 0;  // first element
  Index ours = 0;
  Index count = 0;
  friend bool operator==(const Slab&, const Slab&) = default;
};

/// In ascending order, together the whole tensor; of at most a few million elements where the order allows it (else one
/// expert's matrix).
std::vector<Slab> slabs(const HfTensor& tensor);

/// Reorders a slab; both spans have slab.count elements. `ours` may be empty where tensor.ours is.
void to_theirs(const HfTensor& tensor, std::span<const float> ours, std::span<float> theirs);
void to_ours(const HfTensor& tensor, std::span<const float> theirs, std::span<float> ours);

/// Whether the elements of a slab lie in the same order in both, so that any part of it can be read by itself.
bool is_contiguous(const HfTensor& tensor);

}  // namespace ragged::train
