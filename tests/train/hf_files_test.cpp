// Whole folders: checkpoints of any number of ranks out, weights in by any interval, and everything that may be wrong.
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "ragged/checkpoint/elements.h"
#include "ragged/train/hf_config.h"
#include "ragged/train/hf_export.h"
#include "ragged/train/hf_weights.h"
#include "tests/checkpoint/files.h"
#include "tests/support/expect_error.h"

namespace ragged::train {
namespace {

namespace fs = std::filesystem;
using ::ragged::testing::CheckpointFolder;
using ::ragged::testing::read_bytes;
using ::ragged::testing::WholeTensor;
using ::ragged::testing::write_bytes;

const ModelConfig kLlama{.dim = 12, .layers = 2, .heads = 3, .kv_heads = 1, .feed_forward = 7};
const ModelConfig kTied{.dim = 10, .layers = 1, .heads = 2, .kv_heads = 1, .head_dim = 6, .tied_embeddings = true};
const ModelConfig
    kGptOss{.kind = "moe", .dim = 6, .layers = 2, .heads = 3, .kv_heads = 1, .feed_forward = 5, .experts = 3};
const ModelConfig kMixtral{
    .kind = "moe",
    .dim = 6,
    .layers = 1,
    .heads = 3,
    .kv_heads = 3,
    .feed_forward = 5,
    .experts = 3,
    .expert_biases = false};

using Values = std::map<std::string, std::vector<float>>;

Values some_values(const ModelConfig& config) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  Values values;
  for (const NamedShape& ours : hf_names(config).ours) {
    for (Index i = 0; i < checked_product(ours.shape); ++i) values[ours.name].push_back(0.1F * normal(random));
  }
  return values;
}

std::vector<WholeTensor> tensors_of(const ModelConfig& config, const Values& values) {
  std::vector<WholeTensor> tensors;
  for (const NamedShape& ours : hf_names(config).ours) {
    const std::vector<float>& floats = values.at(ours.name);
    WholeTensor tensor;
    tensor.info.name = ours.name;
    tensor.info.dtype = "F32";
    tensor.info.shape = ours.shape;
    tensor.bytes.resize(4 * floats.size());
    std::memcpy(tensor.bytes.data(), floats.data(), tensor.bytes.size());
    tensors.push_back(std::move(tensor));
  }
  tensors.push_back(testing::whole_tensor("state.norm.weight.exp_avg", "BF16", {3}));
  return tensors;
}

checkpoint::Facts facts_of(const ModelConfig& model) {
  Config config;
  config.model = model;
  config.train.sequence = 33;
  return {.texts = {{"config", to_toml(config)}}};
}

checkpoint::Checkpoint saved(
    const fs::path& folder, const ModelConfig& config, const std::vector<WholeTensor>& tensors, int ranks = 2) {
  fs::create_directories(folder);
  testing::write_checkpoint(folder, tensors, {.world_size = ranks, .chunk_bytes = 64}, 7, facts_of(config));
  return checkpoint::Checkpoint::open(folder);
}

std::map<std::string, std::string> files_in(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    files[entry.path().filename().string()] = read_bytes(entry.path());
  }
  return files;
}

std::vector<float> read(const HfWeights& weights, const std::string& ours, layout::Interval owned) {
  std::vector<float> values(static_cast<std::size_t>(owned.size()), NAN);
  weights.read(ours, owned, [&](Index offset, std::span<const float> part) {
    for (std::size_t i = 0; i < part.size(); ++i) {
      float& value = values.at(static_cast<std::size_t>(offset) + i);
      EXPECT_TRUE(std::isnan(value)) << ours << ": stored twice";
      value = part[i];
    }
  });
  return values;
}

void expect_near(const std::vector<float>& found, const std::vector<float>& expected, float tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_LE(std::fabs(found[i] - expected[i]), tolerance) << i;  // NaN fails
  }
}

// Of biases from which 1 was taken on the way.
float tolerance_of(const std::string& name) {
  return name.ends_with("gate_up_proj_bias") ? 1.2e-7F : 0.0F;
}

TEST(HfFiles, an_export_is_the_same_whatever_ranks_saved_it) {
  for (const ModelConfig& config : {kLlama, kTied, kGptOss, kMixtral}) {
    for (const Index limit : {Index{1} << 40, Index{4000}}) {
      std::map<std::string, std::string> first;
      for (const int ranks : {1, 2, 3, 4, 7}) {
        const CheckpointFolder folder;
        HfExportOptions options;
        options.files.max_file_bytes = limit;
        const auto checkpoint = saved(folder / "step", config, tensors_of(config, some_values(config)), ranks);
        const HfExportReport report = export_to_hf(checkpoint, folder / "out", options);
        EXPECT_EQ(report.architecture, hf_names(config).architecture);
        EXPECT_EQ(report.files.size() > 1, limit == 4000);
        const auto files = files_in(folder / "out");
        EXPECT_EQ(files.size(), 4 + report.files.size() + (report.files.size() > 1 ? 1 : 0));
        if (first.empty()) first = files;
        EXPECT_TRUE(files == first) << ranks;
      }
    }
  }
}

TEST(HfFiles, what_went_out_comes_in) {
  for (const ModelConfig& config : {kLlama, kTied, kGptOss, kMixtral}) {
    const CheckpointFolder folder;
    const Values values = some_values(config);
    export_to_hf(saved(folder / "step", config, tensors_of(config, values)), folder / "out");
    const HfWeights weights = HfWeights::open(folder / "out");
    EXPECT_TRUE(model_differences(config, weights.config()).empty());
    EXPECT_TRUE(weights.unused().empty());
    for (const auto& [name, expected] : values) {
      SCOPED_TRACE(name);
      expect_near(read(weights, name, {0, static_cast<Index>(expected.size())}), expected, tolerance_of(name));
    }
    const Config parsed = parse_config(import_config(weights), "x");
    EXPECT_EQ(parsed.model.from, (folder / "out").string());
    EXPECT_TRUE(model_differences(config, parsed.model).empty());
  }
}

TEST(HfFiles, any_part_of_a_parameter_is_read_by_itself) {
  std::mt19937 random(3);
  for (const ModelConfig& config : {kLlama, kGptOss, kMixtral}) {
    const CheckpointFolder folder;
    const Values values = some_values(config);
    export_to_hf(saved(folder / "step", config, tensors_of(config, values)), folder / "out");
    const HfWeights weights = HfWeights::open(folder / "out");
    for (const auto& [name, whole] : values) {
      const auto numel = static_cast<Index>(whole.size());
      for (int i = 0; i < 20; ++i) {
        Index begin = static_cast<Index>(random()) % (numel + 1);
        Index end = static_cast<Index>(random()) % (numel + 1);
        if (begin > end) std::swap(begin, end);
        expect_near(
            read(weights, name, {begin, end}), std::vector<float>(whole.begin() + begin, whole.begin() + end),
            tolerance_of(name));
      }
    }
  }
}

TEST(HfFiles, bf16_rounds_once) {
  const CheckpointFolder folder;
  Values values = some_values(kLlama);
  HfExportOptions options;
  options.dtype = "bf16";
  const HfExportReport report =
      export_to_hf(saved(folder / "step", kLlama, tensors_of(kLlama, values)), folder / "out", options);
  EXPECT_EQ(report.dtype, "BF16");
  const HfWeights weights = HfWeights::open(folder / "out");
  EXPECT_EQ(weights.files().find("model.norm.weight")->dtype, "BF16");
  for (auto& [name, whole] : values) {
    const std::vector<float> found = read(weights, name, {0, static_cast<Index>(whole.size())});
    std::vector<std::byte> bytes(2 * whole.size());
    checkpoint::encode_elements("BF16", whole, bytes);
    checkpoint::decode_elements("BF16", bytes, whole);
    EXPECT_EQ(found, whole) << name;
  }
  // What came in as bf16 goes out with the same bytes.
  export_to_hf(saved(folder / "again", kLlama, tensors_of(kLlama, values)), folder / "out2", options);
  EXPECT_TRUE(files_in(folder / "out2") == files_in(folder / "out"));
  EXPECT_NE(read_bytes(folder / "out" / "config.json").find("\"bfloat16\""), std::string::npos);
}

// --- weights that don't fit ---

struct Tensor {
  plan::SafetensorsEntry entry;
  std::vector<std::byte> bytes;
};

// A folder as others write it, changed by `change`.
void write_folder(
    const fs::path& folder, const ModelConfig& config,
    const std::function<void(std::map<std::string, Tensor>&)>& change) {
  std::map<std::string, Tensor> tensors;
  for (const HfTensor& tensor : hf_names(config).theirs) {
    const std::vector<float> values(static_cast<std::size_t>(checked_product(tensor.shape)), tensor.constant);
    Tensor& made = tensors[tensor.name];
    made.entry = {.name = tensor.name, .dtype = "F32", .shape = tensor.shape};
    made.bytes.resize(4 * values.size());
    std::memcpy(made.bytes.data(), values.data(), made.bytes.size());
  }
  change(tensors);
  std::vector<plan::SafetensorsEntry> entries;
  std::vector<std::string> order;
  for (const auto& [name, tensor] : tensors) {
    entries.push_back(tensor.entry);
    entries.back().name = name;
    order.push_back(name);
  }
  fs::create_directories(folder);
  checkpoint::write_model_files(
      folder, entries, [&](std::size_t i, const checkpoint::TakeBytes& take) { take(tensors.at(order[i]).bytes); });
  write_bytes(folder / "config.json", hf_config_json(config, "F32", 16));
}

TEST(HfFiles, weights_that_dont_fit_are_named) {
  const CheckpointFolder folder;
  int count = 0;
  const auto open = [&](const ModelConfig& config, const std::function<void(std::map<std::string, Tensor>&)>& change) {
    const fs::path path = folder / std::to_string(count++);
    write_folder(path, config, change);
    return HfWeights::open(path);
  };
  const std::string norm = "model.norm.weight";
  EXPECT_NO_THROW(open(kLlama, [](auto&) {}));
  EXPECT_CHECKPOINT_ERROR(
      open(kLlama, [&](auto& tensors) { tensors.erase(norm); }), "Expected a tensor 'model.norm.weight'");
  EXPECT_CHECKPOINT_ERROR(
      open(
          kLlama,
          [&](auto& tensors) {
            tensors[norm].entry.shape = {3, 4};
          }),
      "of shape [12], as config.json says, but got [3, 4]");
  EXPECT_CHECKPOINT_ERROR(
      open(kLlama, [&](auto& tensors) { tensors[norm].entry.dtype = "I32"; }),
      "'model.norm.weight' as F32, BF16 or F16, but got I32");
  EXPECT_CHECKPOINT_ERROR(
      open(kLlama, [&](auto& tensors) { tensors["model.layers.0.self_attn.q_proj.bias"] = tensors[norm]; }),
      "Expected only tensors of a LlamaForCausalLM, but got 'model.layers.0.self_attn.q_proj.bias'");
  EXPECT_CHECKPOINT_ERROR(
      open(kGptOss, [&](auto& tensors) { tensors["model.layers.1.self_attn.sinks"].bytes.assign(12, std::byte{0}); }),
      "'model.layers.1.self_attn.sinks', which do nothing, but got 0");
  EXPECT_CHECKPOINT_ERROR(HfWeights::open(folder / "nowhere"), "config.json");
  fs::create_directories(folder / "no_weights");
  write_bytes(folder / "no_weights" / "config.json", hf_config_json(kLlama, "F32", 16));
  EXPECT_CHECKPOINT_ERROR(HfWeights::open(folder / "no_weights"), "model.safetensors");
}

TEST(HfFiles, what_nobody_needs_is_listed) {
  const CheckpointFolder folder;
  write_folder(folder / "tied", kTied, [](auto& tensors) {
    tensors["lm_head.weight"] = tensors.at("model.embed_tokens.weight");
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = {
        .entry = {.name = "", .dtype = "F32", .shape = {1}}, .bytes = std::vector<std::byte>(4)};
  });
  EXPECT_EQ(
      HfWeights::open(folder / "tied").unused(),
      (std::vector<std::string>{"lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}));
}

TEST(HfFiles, a_file_that_shrinks_after_it_was_opened_is_named) {
  const CheckpointFolder folder;
  write_folder(folder / "m", kLlama, [](auto&) {});
  const HfWeights weights = HfWeights::open(folder / "m");
  fs::resize_file(folder / "m" / "model.safetensors", fs::file_size(folder / "m" / "model.safetensors") - 8);
  EXPECT_CHECKPOINT_ERROR(read(weights, "norm.weight", {0, 12}), "'model.norm.weight'");
}

// --- checkpoints that can't go out ---

class BadExport : public ::testing::Test {
 protected:
  // Nothing is left of the attempt.
  void expect_refused(const checkpoint::Checkpoint& checkpoint, const std::string& message) {
    EXPECT_CHECKPOINT_ERROR(export_to_hf(checkpoint, folder_ / "below" / "out"), message);
    std::error_code error;
    EXPECT_TRUE(!fs::exists(folder_ / "below", error) || fs::is_empty(folder_ / "below")) << message;
  }
  std::vector<WholeTensor> tensors() const { return tensors_of(kLlama, some_values(kLlama)); }

  CheckpointFolder folder_;
};

TEST_F(BadExport, tensors_that_arent_the_models) {
  auto changed = tensors();
  changed.erase(changed.begin());
  expect_refused(saved(folder_ / "1", kLlama, changed), "'embed_tokens.weight' of shape [256, 12]");
  changed = tensors();
  changed.push_back(testing::whole_tensor("extra", "F32", {3}));
  expect_refused(saved(folder_ / "2", kLlama, changed), "'extra'");
  changed = tensors();
  changed[0] = testing::whole_tensor("embed_tokens.weight", "F32", {12, 256});
  expect_refused(saved(folder_ / "3", kLlama, changed), "but got [12, 256] as F32");
  changed[0] = testing::whole_tensor("embed_tokens.weight", "I64", {256, 12});
  expect_refused(saved(folder_ / "4", kLlama, changed), "as I64");
}

TEST_F(BadExport, checkpoints_of_others) {
  fs::create_directories(folder_ / "other");
  testing::write_checkpoint(folder_ / "other", tensors());
  expect_refused(checkpoint::Checkpoint::open(folder_ / "other"), "holds no config");
}

TEST_F(BadExport, damage_leaves_nothing_behind) {
  saved(folder_ / "step", kLlama, tensors(), 3);
  for (const auto& entry : fs::directory_iterator(folder_ / "step")) {
    if (entry.path().extension() != ".safetensors") continue;
    const std::string whole = read_bytes(entry.path());
    std::string damaged = whole;
    damaged[damaged.size() / 2] = static_cast<char>(damaged[damaged.size() / 2] ^ 1);
    write_bytes(entry.path(), damaged);
    expect_refused(checkpoint::Checkpoint::open(folder_ / "step"), entry.path().filename().string());
    write_bytes(entry.path(), whole);
  }
}

TEST_F(BadExport, a_folder_that_is_there_stays_as_it_is) {
  const auto checkpoint = saved(folder_ / "step", kLlama, tensors());
  fs::create_directories(folder_ / "out");
  write_bytes(folder_ / "out" / "mine", "x");
  EXPECT_CHECKPOINT_ERROR(export_to_hf(checkpoint, folder_ / "out"), "Nothing is overwritten");
  EXPECT_EQ(files_in(folder_ / "out").size(), 1u);
}

TEST_F(BadExport, options_that_cant_be) {
  const auto checkpoint = saved(folder_ / "step", kLlama, tensors());
  EXPECT_INVALID(export_to_hf(checkpoint, folder_ / "out", {.dtype = "int4"}), "int4");
  EXPECT_INVALID(export_to_hf(checkpoint, folder_ / "out", {.tokenizer = folder_ / "step"}), "--tokenizer");
  EXPECT_FALSE(fs::exists(folder_ / "out"));
}

TEST(HfFiles, a_tokenizer_is_made_or_copied) {
  const CheckpointFolder folder;
  const auto checkpoint = saved(folder / "step", kLlama, tensors_of(kLlama, some_values(kLlama)));
  export_to_hf(checkpoint, folder / "bytes");
  EXPECT_EQ(read_bytes(folder / "bytes" / "tokenizer.json"), byte_tokenizer_json());
  fs::create_directories(folder / "words");
  write_bytes(folder / "words" / "tokenizer.json", "{}");
  write_bytes(folder / "words" / "vocab.txt", "a b");
  write_bytes(folder / "words" / "README.md", "no tokenizer");
  export_to_hf(checkpoint, folder / "out", {.tokenizer = folder / "words"});
  const auto files = files_in(folder / "out");
  EXPECT_EQ(files.at("tokenizer.json"), "{}");
  EXPECT_EQ(files.at("vocab.txt"), "a b");
  EXPECT_FALSE(files.contains("README.md"));
  EXPECT_FALSE(files.contains("tokenizer_config.json"));
}

}  // namespace
}  // namespace ragged::train
