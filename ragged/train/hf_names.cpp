#include "ragged/train/hf_names.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "ragged/base/error.h"

namespace ragged::train {
namespace {

constexpr Index kSlab = Index{1} << 22;

// Row-major strides.
std::vector<Index> dense(const std::vector<Index>& dims) {
  std::vector<Index> strides(dims.size(), 1);
  for (std::size_t d = dims.size(); d-- > 1;) strides[d - 1] = strides[d] * dims[d];
  return strides;
}

class Builder {
 public:
  explicit Builder(const ModelConfig& config) : config_(config) {}

  HfNames build() {
    const Index dim = config_.dim;
    add("model.embed_tokens.weight", "embed_tokens.weight", {config_.vocabulary, dim});
    for (Index layer = 0; layer < config_.layers; ++layer) {
      ours_ = fmt::format("layers.{}.", layer);
      theirs_ = "model." + ours_;
      add_attention();
      if (config_.kind == "llama") {
        add_swiglu();
      } else if (config_.expert_biases) {
        add_gpt_oss();
      } else {
        add_mixtral();
      }
    }
    add("model.norm.weight", "norm.weight", {dim});
    if (!config_.tied_embeddings) add("lm_head.weight", "lm_head.weight", {config_.vocabulary, dim});
    names_.architecture = config_.kind == "llama" ? "LlamaForCausalLM"
        : config_.expert_biases                   ? "GptOssForCausalLM"
                                                  : "MixtralForCausalLM";
    return std::move(names_);
  }

 private:
  void declare(const std::string& ours, std::vector<Index> shape) { names_.ours.push_back({ours, std::move(shape)}); }

  // The same tensor under another name.
  void add(const std::string& theirs, const std::string& ours, const std::vector<Index>& shape) {
    declare(ours, shape);
    names_.theirs.push_back(
        {.name = theirs, .shape = shape, .ours = ours, .dims = {checked_product(shape)}, .strides = {1}});
  }
  void add_in_layer(const std::string& name, const std::vector<Index>& shape) {
    add(theirs_ + name, ours_ + name, shape);
  }

  void add_attention() {
    const Index dim = config_.dim;
    const Index q_dim = config_.heads * config_.dim_of_head();
    const Index kv_dim = config_.kv_heads * config_.dim_of_head();
    add_in_layer("input_layernorm.weight", {dim});
    add_in_layer("self_attn.q_proj.weight", {q_dim, dim});
    add_in_layer("self_attn.k_proj.weight", {kv_dim, dim});
    add_in_layer("self_attn.v_proj.weight", {kv_dim, dim});
    add_in_layer("self_attn.o_proj.weight", {dim, q_dim});
    add_in_layer("post_attention_layernorm.weight", {dim});
  }

  void add_swiglu() {
    add_in_layer("mlp.gate_proj.weight", {config_.feed_forward, config_.dim});
    add_in_layer("mlp.up_proj.weight", {config_.feed_forward, config_.dim});
    add_in_layer("mlp.down_proj.weight", {config_.dim, config_.feed_forward});
  }

  void add_gpt_oss() {
    const Index dim = config_.dim;
    const Index ff = config_.feed_forward;
    const Index experts = config_.experts;
    names_.theirs.push_back(
        {.name = theirs_ + "self_attn.sinks",
         .shape = {config_.heads},
         .dims = {config_.heads},
         .strides = {1},
         .constant = kNoSink});
    add_in_layer("mlp.router.weight", {experts, dim});
    add_in_layer("mlp.router.bias", {experts});
    // There a row of the matrix is an input, and gates and ups alternate.
    add_view(
        "mlp.experts.gate_up_proj", {experts, dim, 2 * ff}, {experts, 2 * ff, dim}, {experts, dim, ff, 2},
        {2 * ff * dim, 1, dim, ff * dim});
    add_view("mlp.experts.gate_up_proj_bias", {experts, 2 * ff}, {experts, 2 * ff}, {experts, ff, 2}, {2 * ff, 1, ff});
    names_.theirs.back().odd_offset = -1.0F;
    add_view("mlp.experts.down_proj", {experts, ff, dim}, {experts, dim, ff}, {experts, ff, dim}, {dim * ff, 1, ff});
    add_in_layer("mlp.experts.down_proj_bias", {experts, dim});
  }

  void add_view(
      const std::string& name, std::vector<Index> theirs, std::vector<Index> ours, std::vector<Index> dims,
      std::vector<Index> strides) {
    declare(ours_ + name, std::move(ours));
    names_.theirs.push_back(
        {.name = theirs_ + name,
         .shape = std::move(theirs),
         .ours = ours_ + name,
         .dims = std::move(dims),
         .strides = std::move(strides)});
  }

  void add_mixtral() {
    const Index dim = config_.dim;
    const Index ff = config_.feed_forward;
    const Index experts = config_.experts;
    add(theirs_ + "block_sparse_moe.gate.weight", ours_ + "mlp.router.weight", {experts, dim});
    declare(ours_ + "mlp.experts.gate_up_proj", {experts, 2 * ff, dim});
    declare(ours_ + "mlp.experts.down_proj", {experts, dim, ff});
    for (Index e = 0; e < experts; ++e) {
      const auto part = [&](const char* name, const char* ours, std::vector<Index> shape, Index base) {
        names_.theirs.push_back(
            {.name = fmt::format("{}block_sparse_moe.experts.{}.{}.weight", theirs_, e, name),
             .shape = std::move(shape),
             .ours = ours_ + ours,
             .base = base,
             .dims = {ff * dim},
             .strides = {1}});
      };
      part("w1", "mlp.experts.gate_up_proj", {ff, dim}, 2 * e * ff * dim);
      part("w2", "mlp.experts.down_proj", {dim, ff}, e * ff * dim);
      part("w3", "mlp.experts.gate_up_proj", {ff, dim}, (2 * e + 1) * ff * dim);
    }
  }

  const ModelConfig& config_;
  HfNames names_;
  std::string ours_;  // prefixes of the layer
  std::string theirs_;
};

// Calls visit(place in ours) for each element of a slab, in the order of theirs.
template <class Visit>
void walk(const HfTensor& tensor, Index count, Visit visit) {
  if (is_contiguous(tensor)) {
    for (Index i = 0; i < count; ++i) visit(i);
    return;
  }
  const std::size_t last = tensor.dims.size() - 1;
  std::vector<Index> at(tensor.dims.size(), 0);  // dim 0 stays: it counts slabs
  Index place = 0;
  for (Index done = 0; done < count; done += tensor.dims[last]) {
    for (Index i = 0; i < tensor.dims[last]; ++i) visit(place + i * tensor.strides[last]);
    for (std::size_t d = last; d-- > 1;) {
      place += tensor.strides[d];
      if (++at[d] < tensor.dims[d]) break;
      place -= tensor.dims[d] * tensor.strides[d];
      at[d] = 0;
    }
  }
}

}  // namespace

HfNames hf_names(const ModelConfig& config) {
  return Builder(config).build();
}

bool is_contiguous(const HfTensor& tensor) {
  return tensor.strides == dense(tensor.dims) && tensor.odd_offset == 0.0F;
}

std::vector<Slab> slabs(const HfTensor& tensor) {
  const Index numel = checked_product(tensor.shape);
  std::vector<Slab> result;
  const bool by_dim0 = !is_contiguous(tensor);
  const Index most = by_dim0 ? numel / std::max<Index>(1, tensor.dims[0]) : kSlab;
  const Index step = by_dim0 ? tensor.strides[0] : most;
  Index ours = tensor.base;
  for (Index begin = 0; begin < numel; begin += most, ours += step) {
    result.push_back({begin, ours, std::min(most, numel - begin)});
  }
  return result;
}

void to_theirs(const HfTensor& tensor, std::span<const float> ours, std::span<float> theirs) {
  if (tensor.ours.empty()) {
    std::ranges::fill(theirs, tensor.constant);
    return;
  }
  std::size_t k = 0;
  walk(tensor, static_cast<Index>(theirs.size()), [&](Index place) {
    theirs[k++] = ours[static_cast<std::size_t>(place)];
  });
  if (tensor.odd_offset == 0.0F) return;
  for (std::size_t i = 1; i < theirs.size(); i += 2) theirs[i] += tensor.odd_offset;
}

void to_ours(const HfTensor& tensor, std::span<const float> theirs, std::span<float> ours) {
  std::size_t k = 0;
  walk(tensor, static_cast<Index>(theirs.size()), [&](Index place) {
    const float offset = k % 2 == 1 ? tensor.odd_offset : 0.0F;
    ours[static_cast<std::size_t>(place)] = theirs[k++] - offset;
  });
}

}  // namespace ragged::train
