// The table of names against the models it is about, and the reordering against its definition in torch operations.
#include "ragged/train/hf_names.h"

#include <map>
#include <numeric>
#include <set>
#include <string>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ragged/train/language_model.h"

namespace ragged::train {
namespace {

const ModelConfig kLlama{.dim = 24, .layers = 2, .heads = 6, .kv_heads = 2, .feed_forward = 10};
const ModelConfig
    kTied{.dim = 10, .layers = 1, .heads = 3, .kv_heads = 1, .head_dim = 4, .feed_forward = 7, .tied_embeddings = true};
const ModelConfig
    kGptOss{.kind = "moe", .dim = 6, .layers = 2, .heads = 3, .kv_heads = 1, .feed_forward = 5, .experts = 3};
const ModelConfig kMixtral{
    .kind = "moe",
    .dim = 6,
    .layers = 2,
    .heads = 3,
    .kv_heads = 3,
    .feed_forward = 5,
    .experts = 3,
    .expert_biases = false,
    .tied_embeddings = true};
const ModelConfig
    kOnes{.kind = "moe", .dim = 2, .layers = 1, .heads = 1, .kv_heads = 1, .feed_forward = 1, .experts = 1};

std::vector<ModelConfig> all_kinds() {
  return {kLlama, kTied, kGptOss, kMixtral, kOnes};
}

TEST(HfNames, ours_are_the_models_parameters) {
  for (const ModelConfig& config : all_kinds()) {
    const auto model = make_model(config, parameters_on(c10::kMeta));
    std::map<std::string, std::vector<Index>> expected;
    std::set<const c10::TensorImpl*> seen;
    for (const auto& parameter : model->named_parameters()) {
      if (!seen.insert(parameter.value().unsafeGetTensorImpl()).second) continue;
      expected[parameter.key()] = parameter.value().sizes().vec();
    }
    std::map<std::string, std::vector<Index>> found;
    const HfNames names = hf_names(config);
    for (const NamedShape& ours : names.ours) EXPECT_TRUE(found.emplace(ours.name, ours.shape).second) << ours.name;
    EXPECT_EQ(found, expected) << names.architecture;
  }
}

TEST(HfNames, architectures_follow_from_the_mathematics) {
  EXPECT_EQ(hf_names(kLlama).architecture, "LlamaForCausalLM");
  EXPECT_EQ(hf_names(kGptOss).architecture, "GptOssForCausalLM");
  EXPECT_EQ(hf_names(kMixtral).architecture, "MixtralForCausalLM");
}

TEST(HfNames, every_element_of_ours_has_one_place_in_theirs) {
  for (const ModelConfig& config : all_kinds()) {
    const HfNames names = hf_names(config);
    std::map<std::string, std::vector<int>> hits;
    for (const NamedShape& ours : names.ours) {
      hits[ours.name].assign(static_cast<std::size_t>(checked_product(ours.shape)), 0);
    }
    std::set<std::string> distinct;
    for (const HfTensor& tensor : names.theirs) {
      EXPECT_TRUE(distinct.insert(tensor.name).second) << tensor.name;
      EXPECT_EQ(checked_product(tensor.dims), checked_product(tensor.shape)) << tensor.name;
      if (tensor.ours.empty()) continue;
      // By the definition, one element at a time.
      for (Index i = 0; i < checked_product(tensor.shape); ++i) {
        Index place = tensor.base;
        Index rest = i;
        for (std::size_t d = tensor.dims.size(); d-- > 0; rest /= tensor.dims[d]) {
          place += rest % tensor.dims[d] * tensor.strides[d];
        }
        ++hits.at(tensor.ours).at(static_cast<std::size_t>(place));
      }
    }
    for (const auto& [name, counts] : hits) {
      EXPECT_EQ(std::set<int>(counts.begin(), counts.end()), std::set<int>{1}) << name;
    }
  }
}

TEST(HfNames, slabs_follow_each_other_and_fill_the_tensor) {
  ModelConfig large = kLlama;
  large.vocabulary = 400000;  // more than a slab holds
  for (const ModelConfig& config : {large, kGptOss, kMixtral, kOnes}) {
    for (const HfTensor& tensor : hf_names(config).theirs) {
      Index next = 0;
      for (const Slab& slab : slabs(tensor)) {
        EXPECT_EQ(slab.theirs, next);
        EXPECT_GT(slab.count, 0);
        EXPECT_LE(slab.count, Index{1} << 22);
        next += slab.count;
      }
      EXPECT_EQ(next, checked_product(tensor.shape)) << tensor.name;
    }
  }
  EXPECT_EQ(slabs(hf_names(large).theirs.front()).size(), 3u);
}

// --- values ---

using Values = std::map<std::string, at::Tensor>;

Values some_values(const HfNames& names) {
  Values values;
  for (const NamedShape& ours : names.ours) values[ours.name] = at::randn(ours.shape);
  return values;
}

std::span<float> span_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
}

at::Tensor theirs_of(const HfTensor& tensor, const Values& ours) {
  at::Tensor result = at::full(tensor.shape, NAN);
  for (const Slab& slab : slabs(tensor)) {
    std::span<const float> source;
    const auto count = static_cast<std::size_t>(slab.count);
    if (!tensor.ours.empty())
      source = span_of(ours.at(tensor.ours)).subspan(static_cast<std::size_t>(slab.ours), count);
    to_theirs(tensor, source, span_of(result).subspan(static_cast<std::size_t>(slab.theirs), count));
  }
  return result;
}

Values all_of_theirs(const HfNames& names, const Values& ours) {
  Values theirs;
  for (const HfTensor& tensor : names.theirs) theirs[tensor.name] = theirs_of(tensor, ours);
  return theirs;
}

TEST(HfNames, a_llama_has_the_same_tensors_below_model) {
  const HfNames names = hf_names(kLlama);
  const Values ours = some_values(names);
  const Values theirs = all_of_theirs(names, ours);
  ASSERT_EQ(theirs.size(), ours.size());
  for (const auto& [name, value] : ours) {
    EXPECT_TRUE(at::equal(theirs.at(name == "lm_head.weight" ? name : "model." + name), value)) << name;
  }
  EXPECT_FALSE(all_of_theirs(hf_names(kTied), some_values(hf_names(kTied))).contains("lm_head.weight"));
}

TEST(HfNames, gpt_oss_is_transposed_and_interleaved) {
  for (const ModelConfig& config : {kGptOss, kOnes}) {
    const HfNames names = hf_names(config);
    const Values ours = some_values(names);
    const Values theirs = all_of_theirs(names, ours);
    EXPECT_EQ(theirs.size(), ours.size() + static_cast<std::size_t>(config.layers));
    const std::string layer = fmt::format("layers.{}.", config.layers - 1);
    const auto mine = [&](const char* name) { return ours.at(layer + name); };
    const auto other = [&](const char* name) { return theirs.at("model." + layer + name); };
    const auto halves = mine("mlp.experts.gate_up_proj").chunk(2, 1);
    const at::Tensor matrix = other("mlp.experts.gate_up_proj");
    ASSERT_EQ(matrix.sizes(), (std::vector<Index>{config.experts, config.dim, 2 * config.feed_forward}));
    EXPECT_TRUE(at::equal(matrix.slice(2, 0, {}, 2), halves[0].transpose(1, 2)));
    EXPECT_TRUE(at::equal(matrix.slice(2, 1, {}, 2), halves[1].transpose(1, 2)));
    const auto bias_halves = mine("mlp.experts.gate_up_proj_bias").chunk(2, 1);
    const at::Tensor bias = other("mlp.experts.gate_up_proj_bias");
    EXPECT_TRUE(at::equal(bias.slice(1, 0, {}, 2), bias_halves[0]));
    EXPECT_TRUE(at::equal(bias.slice(1, 1, {}, 2), bias_halves[1] - 1));
    EXPECT_TRUE(at::equal(other("mlp.experts.down_proj"), mine("mlp.experts.down_proj").transpose(1, 2)));
    EXPECT_TRUE(at::equal(other("self_attn.sinks"), at::full({config.heads}, kNoSink)));
    for (const char* same : {"mlp.router.weight", "mlp.router.bias", "mlp.experts.down_proj_bias"}) {
      EXPECT_TRUE(at::equal(other(same), mine(same))) << same;
    }
  }
}

TEST(HfNames, mixtral_has_a_matrix_an_expert) {
  const HfNames names = hf_names(kMixtral);
  const Values ours = some_values(names);
  const Values theirs = all_of_theirs(names, ours);
  const at::Tensor gate_up = ours.at("layers.1.mlp.experts.gate_up_proj");
  const at::Tensor down = ours.at("layers.1.mlp.experts.down_proj");
  for (Index e = 0; e < kMixtral.experts; ++e) {
    const std::string expert = fmt::format("model.layers.1.block_sparse_moe.experts.{}.", e);
    EXPECT_TRUE(at::equal(theirs.at(expert + "w1.weight"), gate_up[e].narrow(0, 0, 5)));
    EXPECT_TRUE(at::equal(theirs.at(expert + "w3.weight"), gate_up[e].narrow(0, 5, 5)));
    EXPECT_TRUE(at::equal(theirs.at(expert + "w2.weight"), down[e]));
  }
  EXPECT_TRUE(
      at::equal(theirs.at("model.layers.1.block_sparse_moe.gate.weight"), ours.at("layers.1.mlp.router.weight")));
}

TEST(HfNames, the_way_back_inverts) {
  for (const ModelConfig& config : all_kinds()) {
    const HfNames names = hf_names(config);
    const Values ours = some_values(names);
    Values back;
    for (const auto& [name, value] : ours) back[name] = at::full_like(value, NAN);
    for (const HfTensor& tensor : names.theirs) {
      if (tensor.ours.empty()) continue;
      const at::Tensor theirs = theirs_of(tensor, ours);
      for (const Slab& slab : slabs(tensor)) {
        const auto count = static_cast<std::size_t>(slab.count);
        to_ours(
            tensor, span_of(theirs).subspan(static_cast<std::size_t>(slab.theirs), count),
            span_of(back.at(tensor.ours)).subspan(static_cast<std::size_t>(slab.ours), count));
      }
    }
    for (const auto& [name, value] : ours) {
      const bool rounds = name.ends_with("gate_up_proj_bias");  // by the 1 that is subtracted
      EXPECT_TRUE(rounds ? at::allclose(back.at(name), value, 0, 3e-7) : at::equal(back.at(name), value)) << name;
    }
  }
}

}  // namespace
}  // namespace ragged::train
