// Ranks that start from the weights of others: each fills its own shards, and all of them fail together.
#include "ragged/train/hf_load.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ragged/checkpoint/format.h"
#include "ragged/checkpoint/model_files.h"
#include "ragged/fsdp/unit.h"
#include "ragged/train/hf_config.h"
#include "ragged/train/hf_names.h"
#include "ragged/train/language_model.h"
#include "tests/checkpoint/files.h"
#include "tests/support/ranks.h"

namespace ragged::train {
namespace {

namespace fs = std::filesystem;
using test::run_ranks;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const ModelConfig kTied{.dim = 24, .layers = 2, .heads = 6, .kv_heads = 2, .feed_forward = 20, .tied_embeddings = true};
const ModelConfig
    kGptOss{.kind = "moe", .dim = 12, .layers = 2, .heads = 3, .kv_heads = 1, .feed_forward = 5, .experts = 3};
const ModelConfig kMixtral{
    .kind = "moe",
    .dim = 12,
    .layers = 2,
    .heads = 3,
    .kv_heads = 1,
    .feed_forward = 5,
    .experts = 3,
    .expert_biases = false};

// Values of ours in multiples of 1/64, which survive every way there and back.
at::Tensor values_of(const std::string& name, at::IntArrayRef shape) {
  const Index numel = c10::multiply_integers(shape);
  return ((at::arange(numel) * 37 + static_cast<Index>(name.size()) * 11) % 127 / 64.0).to(at::kFloat).view(shape);
}

void write_folder(const fs::path& folder, const ModelConfig& config) {
  const HfNames names = hf_names(config);
  std::map<std::string, at::Tensor> ours;
  for (const NamedShape& shape : names.ours) ours[shape.name] = values_of(shape.name, shape.shape);
  std::vector<plan::SafetensorsEntry> entries;
  for (const HfTensor& tensor : names.theirs) {
    entries.push_back({.name = tensor.name, .dtype = "F32", .shape = tensor.shape});
  }
  checkpoint::write_model_files(
      folder, entries,
      [&](std::size_t i, const checkpoint::TakeBytes& take) {
        const HfTensor& tensor = names.theirs[i];
        for (const Slab& slab : slabs(tensor)) {
          std::vector<float> theirs(static_cast<std::size_t>(slab.count));
          std::span<const float> source;
          if (!tensor.ours.empty()) {
            source = {ours.at(tensor.ours).const_data_ptr<float>() + slab.ours, theirs.size()};
          }
          to_theirs(tensor, source, theirs);
          take(std::as_bytes(std::span<const float>(theirs)));
        }
      },
      {.max_file_bytes = 5000});
  std::ofstream(folder / "config.json") << hf_config_json(config, "F32", 16);
}

struct Sharded {
  std::shared_ptr<LanguageModel> model;
  std::vector<std::shared_ptr<fsdp::Unit>> layers;
  std::shared_ptr<fsdp::Unit> root;
};

Sharded sharded_model(const ModelConfig& config, comm::World& world, const layout::Mesh& mesh) {
  Sharded sharded;
  sharded.model = make_model(config, deferred_parameters(c10::kCPU));
  fsdp::FullyShardOptions options;
  options.groups = world.groups(mesh);
  for (ShardableModule* layer : sharded.model->layer_modules()) {
    sharded.layers.push_back(fsdp::fully_shard(*layer, options));
  }
  sharded.root = fsdp::fully_shard(*sharded.model, options);
  sharded.root->init_parameters(1, sharded.model->init_rule());
  return sharded;
}

TEST(HfLoad, every_rank_gets_what_it_owns) {
  for (ModelConfig config : {kTied, kGptOss, kMixtral}) {
    const testing::CheckpointFolder folder;
    write_folder(folder.path(), config);
    config.from = folder.path().string();
    for (const int ranks : {1, 2, 3, 4, 7}) {
      SCOPED_TRACE(config.kind + " on " + std::to_string(ranks));
      run_ranks(ranks, [&](comm::World& world) {
        const Sharded sharded = sharded_model(config, world, layout::Mesh::shard(ranks));
        const std::string line = load_hf_weights(world.all(), config, sharded.root->sharded_parameters());
        EXPECT_THAT(line, HasSubstr(hf_names(config).architecture));
        for (const buffer::ShardedTensor& parameter : sharded.root->sharded_parameters()) {
          const at::Tensor whole = values_of(parameter.name, parameter.shape).flatten();
          const at::Tensor expected = whole.narrow(0, parameter.owned.begin, parameter.owned.size());
          EXPECT_TRUE(at::equal(parameter.local, expected)) << parameter.name << " on rank " << world.rank();
        }
      });
    }
  }
}

TEST(HfLoad, replicas_get_the_same) {
  const testing::CheckpointFolder folder;
  write_folder(folder.path(), kTied);
  ModelConfig config = kTied;
  config.from = folder.path().string();
  run_ranks(4, [&](comm::World& world) {
    const Sharded sharded = sharded_model(config, world, layout::Mesh::hybrid(2, 2));
    load_hf_weights(world.all(), config, sharded.root->sharded_parameters());
    for (const buffer::ShardedTensor& parameter : sharded.root->sharded_parameters()) {
      const at::Tensor whole = values_of(parameter.name, parameter.shape).flatten();
      EXPECT_TRUE(at::equal(parameter.local, whole.narrow(0, parameter.owned.begin, parameter.owned.size())));
    }
  });
}

TEST(HfLoad, ranks_fail_together_and_change_nothing) {
  const testing::CheckpointFolder folder;
  write_folder(folder.path(), kTied);
  const auto expect_failure = [](const ModelConfig& config, const std::string& message) {
    run_ranks(3, [&](comm::World& world) {
      const Sharded sharded = sharded_model(config, world, layout::Mesh::shard(3));
      std::vector<at::Tensor> before;
      for (const auto& parameter : sharded.root->sharded_parameters()) before.push_back(parameter.local.clone());
      EXPECT_THAT(
          [&] { load_hf_weights(world.all(), config, sharded.root->sharded_parameters()); },
          ThrowsMessage<Error>(HasSubstr(message)));
      const auto after = sharded.root->sharded_parameters();
      for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(after[i].local, before[i]));
    });
  };
  ModelConfig config = kTied;
  config.from = "nowhere/at/all";
  expect_failure(config, "nowhere/at/all");
  config.from = folder.path().string();
  config.feed_forward = 28;
  config.tied_embeddings = false;
  expect_failure(config, "differ in feed_forward: 28 -> 20, tied_embeddings: false -> true");
  config = kTied;
  config.from = folder.path().string();
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    if (entry.path().filename().string().starts_with("model-00002")) fs::remove(entry.path());
  }
  expect_failure(config, "model-00002");
}

}  // namespace
}  // namespace ragged::train
