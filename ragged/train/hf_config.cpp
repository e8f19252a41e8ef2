#include "ragged/train/hf_config.h"

#include <cmath>
#include <map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "ragged/base/error.h"
#include "ragged/plan/json_reader.h"
#include "ragged/train/config_keys.h"
#include "ragged/train/hf_names.h"

namespace ragged::train {
namespace {

using Json = nlohmann::ordered_json;
using plan::detail::JsonNode;

constexpr std::string_view kOperation = "import";
constexpr int kMaxDepth = 32;
// Strangers' sizes decide how much memory the table of names takes, so these are far above any model's.
constexpr Index kMostWide = Index{1} << 24;
constexpr Index kMostLayers = Index{1} << 14;
constexpr Index kMostExperts = Index{1} << 20;  // of all layers
constexpr double kNoLimit = 1e30;               // of GPT-OSS's clamp; every dtype takes it, as infinity at worst

// What transformers takes where config.json says nothing.
struct Family {
  const char* kind;
  bool expert_biases;
  double rope_theta;
  double norm_eps;
};
const std::map<std::string, Family>& families() {
  static const std::map<std::string, Family> all = {
      {"LlamaForCausalLM", {"llama", true, 1e4, 1e-6}},
      {"MistralForCausalLM", {"llama", true, 1e4, 1e-6}},
      {"MixtralForCausalLM", {"moe", false, 1e6, 1e-5}},
      {"GptOssForCausalLM", {"moe", true, 1.5e5, 1e-5}}};
  return all;
}

// config.json, by keys whose absence (or null) has a meaning.
class Keys {
 public:
  Keys(const Json& json, std::string_view source) : json_(json), source_(source) {}

  bool has(const char* key) const { return json_.contains(key) && !json_[key].is_null(); }

  Index integer(const char* key, Index high = kMostWide) const {
    RAGGED_CHECK(has(key), "[{}] Expected a key '{}', but got none ('{}').", kOperation, key, source_);
    return JsonNode(json_[key], place(key), kOperation).integer(1, high);
  }
  double number(const char* key, double fallback) const { return has(key) ? number_of(json_[key], key) : fallback; }
  bool boolean(const char* key, bool fallback) const {
    return has(key) ? JsonNode(json_[key], place(key), kOperation).boolean() : fallback;
  }
  std::string text(const char* key, const char* fallback) const {
    return has(key) ? JsonNode(json_[key], place(key), kOperation).string() : fallback;
  }
  double number_of(const Json& value, const std::string& key) const {
    RAGGED_CHECK(
        value.is_number() && std::isfinite(value.get<double>()), "[{}] Expected a number at {}, but got {}.",
        kOperation, place(key), value.dump());
    return value.get<double>();
  }
  const Json& operator[](const char* key) const { return json_[key]; }

  template <class Value>
  void expect(const char* key, const Value& expected, const Value& found, std::string_view why) const {
    RAGGED_CHECK(
        found == expected, "[{}] Expected {} = {}, but got {} ('{}'). {}", kOperation, key, expected, found, source_,
        why);
  }
  std::string_view source() const { return source_; }

 private:
  std::string place(const std::string& key) const { return fmt::format("{}: {}", source_, key); }

  const Json& json_;
  std::string_view source_;
};

std::string architecture_of(const Keys& keys) {
  static const std::map<std::string, std::string> kByType = {
      {"llama", "LlamaForCausalLM"},
      {"mistral", "MistralForCausalLM"},
      {"mixtral", "MixtralForCausalLM"},
      {"gpt_oss", "GptOssForCausalLM"}};
  std::string found = keys.text("model_type", "");
  if (kByType.contains(found)) found = kByType.at(found);
  if (keys.has("architectures") && keys["architectures"].is_array() && !keys["architectures"].empty()) {
    found = JsonNode(keys["architectures"][0], fmt::format("{}: architectures", keys.source()), kOperation).string();
  }
  RAGGED_CHECK(
      families().contains(found),
      "[{}] Expected the architecture LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM or GptOssForCausalLM, "
      "but got '{}' ('{}'). Models of other architectures train through the Python package.",
      kOperation, found, keys.source());
  return found;
}

// Older configs write rope_theta and rope_scaling, newer ones both in rope_parameters.
void read_rope(const Keys& keys, double fallback, ModelConfig& model) {
  model.rope_theta = keys.number("rope_theta", fallback);
  RAGGED_CHECK(
      keys.number("partial_rotary_factor", 1.0) == 1.0, "[{}] Expected partial_rotary_factor = 1, but got {} ('{}').",
      kOperation, keys.number("partial_rotary_factor", 1.0), keys.source());
  const std::map<std::string, double*> numbers = {
      {"rope_theta", &model.rope_theta},
      {"factor", &model.rope_factor},
      {"low_freq_factor", &model.rope_low_frequency},
      {"high_freq_factor", &model.rope_high_frequency}};
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!keys.has(key)) continue;
    const Json& parameters = keys[key];
    RAGGED_CHECK(
        parameters.is_object(), "[{}] Expected an object '{}', but got {} ('{}').", kOperation, key, parameters.dump(),
        keys.source());
    std::string type = "default";
    for (const auto& [name, value] : parameters.items()) {
      if (name == "rope_type" || name == "type") {
        type = value.is_string() ? value.get<std::string>() : value.dump();
      } else if (numbers.contains(name)) {
        *numbers.at(name) = keys.number_of(value, name);
      } else if (name == "original_max_position_embeddings") {
        model.rope_original_sequence = JsonNode(value, name, kOperation).integer(1, Index{1} << 40);
      } else {
        RAGGED_CHECK(
            name == "partial_rotary_factor" && value == 1.0,
            "[{}] Expected rotary positions without '{}', but got {} (key '{}', '{}').", kOperation, name, value.dump(),
            key, keys.source());
      }
    }
    RAGGED_CHECK(
        type == "default" || type == "llama3",
        "[{}] Expected rotary positions of type default or llama3, but got \"{}\" (key '{}', '{}'). Models here know "
        "no others.",
        kOperation, type, key, keys.source());
    if (type == "default") model.rope_factor = 1.0;
  }
  if (model.rope_factor != 1.0) return;
  const ModelConfig defaults;
  model.rope_low_frequency = defaults.rope_low_frequency;
  model.rope_high_frequency = defaults.rope_high_frequency;
  model.rope_original_sequence = defaults.rope_original_sequence;
}

Json rope_parameters(const ModelConfig& config) {
  const bool is_stretched = config.rope_factor != 1.0;
  Json json;
  json["rope_type"] = is_stretched ? "llama3" : "default";
  json["rope_theta"] = config.rope_theta;
  if (!is_stretched) return json;
  json["factor"] = config.rope_factor;
  json["low_freq_factor"] = config.rope_low_frequency;
  json["high_freq_factor"] = config.rope_high_frequency;
  json["original_max_position_embeddings"] = config.rope_original_sequence;
  return json;
}

// What ours don't have must be switched off.
void check_absent(const Keys& keys, const std::string& architecture) {
  constexpr std::string_view kWhy = "Models here have no such part, so the weights would compute something else.";
  RAGGED_CHECK(
      !keys.has("quantization_config"),
      "[{}] Expected weights in fp32, bf16 or fp16, but '{}' has a quantization_config. Save them dequantised first.",
      kOperation, keys.source());
  keys.expect("hidden_act", std::string("silu"), keys.text("hidden_act", "silu"), kWhy);
  keys.expect("attention_bias", false, keys.boolean("attention_bias", architecture == "GptOssForCausalLM"), kWhy);
  keys.expect("mlp_bias", false, keys.boolean("mlp_bias", false), kWhy);
  if (architecture == "MistralForCausalLM" || architecture == "MixtralForCausalLM") {
    RAGGED_CHECK(
        !keys.has("sliding_window"), "[{}] Expected sliding_window = null, but got {} ('{}'). {}", kOperation,
        keys["sliding_window"].dump(), keys.source(), kWhy);
  }
  if (architecture != "GptOssForCausalLM") return;
  keys.expect("swiglu_alpha", 1.0, keys.number("swiglu_alpha", 1.702), kWhy);
  const double limit = keys.number("swiglu_limit", 7.0);
  RAGGED_CHECK(
      limit >= kNoLimit, "[{}] Expected swiglu_limit of at least {}, but got {} ('{}'). {}", kOperation, kNoLimit,
      limit, keys.source(), kWhy);
  RAGGED_CHECK(
      keys.has("layer_types") && keys["layer_types"].is_array(),
      "[{}] Expected a list 'layer_types', but got none "
      "('{}'). {}",
      kOperation, keys.source(), kWhy);
  for (const Json& type : keys["layer_types"]) {
    RAGGED_CHECK(
        type == "full_attention", "[{}] Expected layer_types of \"full_attention\" alone, but got {} ('{}'). {}",
        kOperation, type.dump(), keys.source(), kWhy);
  }
}

std::string dtype_name(std::string_view dtype) {
  return dtype == "BF16" ? "bfloat16" : dtype == "F16" ? "float16" : "float32";
}

std::string to_utf8(int code) {  // below 2048
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xc0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3f))};
}

Json byte_level() {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
}

}  // namespace

std::string hf_config_json(const ModelConfig& config, std::string_view dtype, Index sequence) {
  const std::string architecture = hf_names(config).architecture;
  const bool is_gpt_oss = architecture == "GptOssForCausalLM";
  Json json;
  json["architectures"] = {architecture};
  json["model_type"] = architecture == "LlamaForCausalLM" ? "llama" : is_gpt_oss ? "gpt_oss" : "mixtral";
  json["vocab_size"] = config.vocabulary;
  json["hidden_size"] = config.dim;
  json["intermediate_size"] = config.feed_forward;
  json["num_hidden_layers"] = config.layers;
  json["num_attention_heads"] = config.heads;
  json["num_key_value_heads"] = config.kv_heads;
  json["head_dim"] = config.dim_of_head();
  json["hidden_act"] = "silu";
  json["max_position_embeddings"] = sequence;
  json["rms_norm_eps"] = config.norm_eps;
  json["rope_theta"] = config.rope_theta;  // of transformers 4, like rope_scaling; 5 reads rope_parameters
  if (config.rope_factor != 1.0) json["rope_scaling"] = rope_parameters(config);
  json["rope_parameters"] = rope_parameters(config);
  json["initializer_range"] = config.init_std;
  json["tie_word_embeddings"] = config.tied_embeddings;
  json["attention_bias"] = false;
  json["attention_dropout"] = 0.0;
  if (config.kind == "moe") {
    json["num_local_experts"] = config.experts;
    json["num_experts_per_tok"] = config.experts_per_token;
    // GPT-OSS wants a number, even where no layer uses it.
    json["sliding_window"] = is_gpt_oss ? Json(128) : Json(nullptr);
  } else {
    json["mlp_bias"] = false;
  }
  if (is_gpt_oss) {
    json["swiglu_alpha"] = 1.0;
    json["swiglu_limit"] = kNoLimit;
    json["layer_types"] = std::vector<std::string>(static_cast<std::size_t>(config.layers), "full_attention");
  }
  for (const char* token : {"bos_token_id", "eos_token_id", "pad_token_id"}) json[token] = nullptr;  // all are bytes
  json["use_cache"] = true;
  json["torch_dtype"] = dtype_name(dtype);
  return json.dump(2) + "\n";
}

std::string hf_generation_config_json() {
  Json json;
  json["do_sample"] = true;
  for (const char* token : {"bos_token_id", "eos_token_id", "pad_token_id"}) json[token] = nullptr;
  return json.dump(2) + "\n";
}

ModelConfig model_config_from_hf(std::string_view text, std::string_view source) {
  Json json;
  try {
    json = plan::detail::parse_json(text, kMaxDepth, kOperation);
  } catch (const InvalidArgument& error) {
    RAGGED_CHECK(false, "{} ('{}')", error.what(), source);
  }
  RAGGED_CHECK(
      json.is_object(), "[{}] Expected an object of keys, but got {} ('{}').", kOperation, json.type_name(), source);
  const Keys keys(json, source);
  const std::string architecture = architecture_of(keys);
  const Family& family = families().at(architecture);
  check_absent(keys, architecture);

  Config config;
  ModelConfig& model = config.model;
  model.kind = family.kind;
  model.expert_biases = family.expert_biases;
  model.dim = keys.integer("hidden_size");
  model.layers = keys.integer("num_hidden_layers", kMostLayers);
  model.heads = keys.integer("num_attention_heads");
  model.kv_heads = keys.has("num_key_value_heads") ? keys.integer("num_key_value_heads") : model.heads;
  if (keys.has("head_dim")) model.head_dim = keys.integer("head_dim");
  if (model.head_dim * model.heads == model.dim) model.head_dim = 0;
  model.feed_forward = keys.integer("intermediate_size");
  if (model.kind == "moe") {
    model.experts = keys.integer("num_local_experts", kMostExperts / model.layers);
    model.experts_per_token = keys.integer("num_experts_per_tok");
  }
  model.vocabulary = keys.integer("vocab_size");
  model.tied_embeddings = keys.boolean("tie_word_embeddings", false);
  read_rope(keys, family.rope_theta, model);
  model.norm_eps = keys.number("rms_norm_eps", family.norm_eps);
  model.init_std = keys.number("initializer_range", model.init_std);
  try {
    validate(config);
    static_cast<void>(checked_product(std::vector<Index>{model.experts, 2, model.feed_forward, model.dim}));
  } catch (const InvalidArgument& error) {
    RAGGED_CHECK(false, "{} That is what '{}' says.", error.what(), source);
  }
  return model;
}

std::vector<std::string> model_differences(const ModelConfig& before, const ModelConfig& now) {
  std::vector<std::string> differences;
  const auto compare = [&](const char* key, const auto& old_value, const auto& new_value) {
    if (old_value != new_value) differences.push_back(fmt::format("{}: {} -> {}", key, old_value, new_value));
  };
  compare("kind", before.kind, now.kind);
  compare("dim", before.dim, now.dim);
  compare("layers", before.layers, now.layers);
  compare("heads", before.heads, now.heads);
  compare("kv_heads", before.kv_heads, now.kv_heads);
  compare("head_dim", before.dim_of_head(), now.dim_of_head());
  compare("feed_forward", before.feed_forward, now.feed_forward);
  if (before.kind == "moe" && now.kind == "moe") {
    compare("experts", before.experts, now.experts);
    compare("experts_per_token", before.experts_per_token, now.experts_per_token);
    compare("expert_biases", before.expert_biases, now.expert_biases);
  }
  compare("vocabulary", before.vocabulary, now.vocabulary);
  compare("tied_embeddings", before.tied_embeddings, now.tied_embeddings);
  compare("rope_theta", before.rope_theta, now.rope_theta);
  compare("rope_factor", before.rope_factor, now.rope_factor);
  if (before.rope_factor != 1.0 && now.rope_factor != 1.0) {
    compare("rope_low_frequency", before.rope_low_frequency, now.rope_low_frequency);
    compare("rope_high_frequency", before.rope_high_frequency, now.rope_high_frequency);
    compare("rope_original_sequence", before.rope_original_sequence, now.rope_original_sequence);
  }
  compare("norm_eps", before.norm_eps, now.norm_eps);
  return differences;
}

std::string byte_tokenizer_json() {
  // Tokenizers of this kind write bytes as letters: themselves where they are printable Latin-1, the others in order
  // from U+0100 on.
  Json vocabulary = Json::object();
  int others = 0;
  for (int byte = 0; byte < 256; ++byte) {
    const bool is_printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
    vocabulary[to_utf8(is_printable ? byte : 256 + others++)] = byte;
  }
  Json model = {{"type", "BPE"}, {"dropout", nullptr}, {"unk_token", nullptr}};
  model["continuing_subword_prefix"] = nullptr;
  model["end_of_word_suffix"] = nullptr;
  model["fuse_unk"] = false;
  model["byte_fallback"] = false;
  model["ignore_merges"] = false;
  model["vocab"] = std::move(vocabulary);
  model["merges"] = Json::array();
  Json json = {{"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr}};
  json["added_tokens"] = Json::array();
  json["normalizer"] = nullptr;
  json["pre_tokenizer"] = byte_level();
  json["post_processor"] = nullptr;
  json["decoder"] = byte_level();
  json["model"] = std::move(model);
  return json.dump(2) + "\n";
}

std::string byte_tokenizer_config_json() {
  Json json;
  json["tokenizer_class"] = "PreTrainedTokenizerFast";
  json["clean_up_tokenization_spaces"] = false;
  json["model_max_length"] = 1000000000;
  return json.dump(2) + "\n";
}

}  // namespace ragged::train
