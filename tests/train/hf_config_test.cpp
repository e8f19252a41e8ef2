// config.json out and in, and what is refused of other people's.
#include "ragged/train/hf_config.h"

#include <set>
#include <string>

#include <nlohmann/json.hpp>

#include "tests/support/expect_error.h"

namespace ragged::train {
namespace {

using Json = nlohmann::json;

const ModelConfig kLlama{
    .dim = 48,
    .layers = 3,
    .heads = 6,
    .kv_heads = 2,
    .feed_forward = 100,
    .vocabulary = 300,
    .rope_theta = 5e5};
const ModelConfig kGptOss{.kind = "moe", .dim = 24, .heads = 6, .head_dim = 10, .norm_eps = 1e-6};
const ModelConfig kMixtral{.kind = "moe", .dim = 24, .heads = 6, .experts = 5, .expert_biases = false, .init_std = 0.1};

Json written(const ModelConfig& config) {
  return Json::parse(hf_config_json(config, "BF16", 128));
}

ModelConfig read(const Json& json) {
  return model_config_from_hf(json.dump(), "the/config.json");
}

TEST(HfConfig, comes_back) {
  ModelConfig tied = kLlama;
  tied.tied_embeddings = true;
  ModelConfig stretched = kLlama;
  stretched.rope_factor = 32;
  stretched.rope_low_frequency = 1.5;
  stretched.rope_high_frequency = 3;
  stretched.rope_original_sequence = 4096;
  for (const ModelConfig& config : {kLlama, tied, stretched, kGptOss, kMixtral}) {
    EXPECT_EQ(read(written(config)), config);
    EXPECT_TRUE(model_differences(config, read(written(config))).empty());
  }
}

TEST(HfConfig, says_what_transformers_asks_for) {
  const Json json = written(kLlama);
  EXPECT_EQ(json["architectures"], Json::array({"LlamaForCausalLM"}));
  EXPECT_EQ(json["model_type"], "llama");
  EXPECT_EQ(json["head_dim"], 8);
  EXPECT_EQ(json["torch_dtype"], "bfloat16");
  EXPECT_EQ(json["max_position_embeddings"], 128);
  EXPECT_EQ(json["eos_token_id"], nullptr);  // Llama's default is a byte of text
  EXPECT_EQ(json["rope_parameters"]["rope_theta"], 5e5);
  EXPECT_EQ(written(kGptOss)["swiglu_alpha"], 1.0);
  EXPECT_EQ(written(kGptOss)["layer_types"].size(), 4u);
  EXPECT_EQ(Json::parse(hf_config_json(kLlama, "F32", 1))["torch_dtype"], "float32");
  EXPECT_EQ(Json::parse(hf_generation_config_json())["eos_token_id"], nullptr);
}

TEST(HfConfig, what_is_absent_has_transformers_defaults) {
  const Json json = {{"model_type", "llama"},    {"hidden_size", 64},        {"num_hidden_layers", 2},
                     {"num_attention_heads", 4}, {"intermediate_size", 100}, {"vocab_size", 1000},
                     {"head_dim", nullptr},      {"rope_scaling", nullptr}};
  ModelConfig config = read(json);
  EXPECT_EQ(config.kv_heads, 4);
  EXPECT_EQ(config.head_dim, 0);
  EXPECT_EQ(config.rope_theta, 1e4);
  EXPECT_EQ(config.norm_eps, 1e-6);
  EXPECT_FALSE(config.tied_embeddings);
  Json newer = json;  // as Llama 3.1 is published
  newer["rope_theta"] = 500000.0;
  newer["rope_scaling"] = {
      {"factor", 8.0},
      {"low_freq_factor", 1.0},
      {"high_freq_factor", 4.0},
      {"original_max_position_embeddings", 8192},
      {"rope_type", "llama3"}};
  EXPECT_EQ(read(newer).rope_factor, 8.0);
  EXPECT_EQ(read(newer).rope_theta, 5e5);
  newer["rope_scaling"]["rope_type"] = "default";
  EXPECT_EQ(read(newer), read([&] {
              Json plain = json;
              plain["rope_theta"] = 500000.0;
              return plain;
            }()));
  Json mistral = json;
  mistral["architectures"] = {"MistralForCausalLM"};
  mistral["rope_theta"] = 1000000;  // an integer is a number too
  EXPECT_EQ(read(mistral).kind, "llama");
  EXPECT_EQ(read(mistral).rope_theta, 1e6);
}

struct Refused {
  ModelConfig config;
  const char* key;
  Json value;
  const char* message;
};

TEST(HfConfig, what_our_models_cant_be_is_refused_by_name) {
  const Refused cases[] = {
      {kLlama, "architectures", {"Qwen2ForCausalLM"}, "'Qwen2ForCausalLM'"},
      {kLlama, "architectures", {3}, "architectures"},
      {kLlama, "attention_bias", true, "attention_bias = false"},
      {kLlama, "mlp_bias", true, "mlp_bias"},
      {kLlama, "hidden_act", "gelu", "hidden_act = silu"},
      {kLlama, "quantization_config", {{"quant_method", "gptq"}}, "quantization_config"},
      {kLlama, "rope_parameters", {{"rope_type", "yarn"}, {"factor", 8}}, "\"yarn\""},
      {kLlama, "rope_parameters", {{"rope_theta", 1e4}, {"partial_rotary_factor", 0.5}}, "'partial_rotary_factor'"},
      {kLlama, "rope_parameters", {{"full_attention", {{"rope_theta", 1e4}}}}, "'full_attention'"},
      {kLlama, "partial_rotary_factor", 0.5, "partial_rotary_factor = 1"},
      {kLlama,
       "rope_parameters",
       {{"rope_type", "llama3"}, {"factor", 8}, {"low_freq_factor", 4}, {"high_freq_factor", 4}},
       "model.rope_high_frequency"},
      {kLlama, "rope_scaling", {{"type", "linear"}}, "\"linear\""},
      {kLlama, "rope_scaling", 3, "rope_scaling"},
      {kLlama, "hidden_size", nullptr, "'hidden_size'"},
      {kLlama, "hidden_size", "big", "hidden_size"},
      {kLlama, "num_key_value_heads", 4, "model.kv_heads"},
      {kLlama, "num_hidden_layers", -1, "num_hidden_layers"},
      {kLlama, "num_hidden_layers", 1000000000, "num_hidden_layers"},
      {kMixtral, "num_local_experts", 1000000000, "num_local_experts"},
      {kLlama, "vocab_size", 1e18, "vocab_size"},
      {kLlama, "head_dim", 7, "model.head_dim"},
      {kLlama, "vocab_size", 100, "model.vocabulary"},
      {kLlama, "rms_norm_eps", "small", "rms_norm_eps"},
      {kLlama, "tie_word_embeddings", 1, "tie_word_embeddings"},
      {kMixtral, "sliding_window", 4096, "sliding_window = null"},
      {kMixtral, "num_local_experts", nullptr, "'num_local_experts'"},
      {kMixtral, "num_experts_per_tok", 6, "model.experts_per_token"},
      {kGptOss, "swiglu_alpha", 1.702, "swiglu_alpha = 1"},
      {kGptOss, "swiglu_alpha", nullptr, "swiglu_alpha = 1"},
      {kGptOss, "swiglu_limit", 7.0, "swiglu_limit"},
      {kGptOss, "attention_bias", nullptr, "attention_bias = false"},  // true where it is absent
      {kGptOss, "layer_types", nullptr, "layer_types"},
      {kGptOss, "layer_types", {"full_attention", "sliding_attention"}, "\"sliding_attention\""}};
  for (const Refused& refused : cases) {
    Json json = written(refused.config);
    json[refused.key] = refused.value;
    SCOPED_TRACE(std::string(refused.key) + " = " + json[refused.key].dump());
    EXPECT_INVALID(read(json), refused.message);
    EXPECT_INVALID(read(json), "the/config.json");
  }
  for (const char* text : {"", "[]", "3", "{", "{\"architectures\": []}", "{}"}) {
    EXPECT_INVALID(model_config_from_hf(text, "the/config.json"), "the/config.json") << text;
  }
}

TEST(HfConfig, differences_are_named) {
  EXPECT_TRUE(model_differences(kLlama, kLlama).empty());
  ModelConfig other = kLlama;
  other.from = "elsewhere";
  other.init_std = 7;
  other.balance_loss = 3;
  other.experts = 77;                // of no matter without experts
  other.head_dim = 8;                // what it was
  other.rope_original_sequence = 3;  // of no matter without a factor
  EXPECT_TRUE(model_differences(kLlama, other).empty());
  other.dim = 96;
  other.tied_embeddings = true;
  EXPECT_EQ(
      model_differences(kLlama, other), (std::vector<std::string>{"dim: 48 -> 96", "tied_embeddings: false -> true"}));
  EXPECT_EQ(model_differences(kGptOss, kMixtral).size(), 4u);  // head_dim, experts, biases, norm_eps
}

TEST(HfConfig, tokens_are_bytes) {
  const Json json = Json::parse(byte_tokenizer_json());
  const Json& vocabulary = json["model"]["vocab"];
  std::set<int> ids;
  for (const auto& [letter, id] : vocabulary.items()) ids.insert(id.get<int>());
  EXPECT_EQ(vocabulary.size(), 256u);
  EXPECT_EQ(ids.size(), 256u);
  EXPECT_EQ(*ids.begin(), 0);
  EXPECT_EQ(*ids.rbegin(), 255);
  // As everybody's byte-level tokenizers write them: a space, a newline, a soft hyphen, the letter e with an accent.
  EXPECT_EQ(vocabulary["\xc4\xa0"], 0x20);
  EXPECT_EQ(vocabulary["\xc4\x8a"], 0x0a);
  EXPECT_EQ(vocabulary["\xc5\x83"], 0xad);
  EXPECT_EQ(vocabulary["\xc3\xa9"], 0xe9);
  EXPECT_EQ(vocabulary["A"], 'A');
  EXPECT_TRUE(json["model"]["merges"].empty());
}

}  // namespace
}  // namespace ragged::train
