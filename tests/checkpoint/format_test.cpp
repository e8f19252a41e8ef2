// The JSON files: exact round trips, and nothing believed that strangers may have written.
#include "ragged/checkpoint/format.h"

#include <cmath>
#include <limits>

#include <nlohmann/json.hpp>

#include "tests/checkpoint/files.h"
#include "tests/support/expect_error.h"

namespace ragged::checkpoint {
namespace {

CheckpointIndex some_index() {
  CheckpointIndex index{.step = 200, .world_size = 2, .chunk_bytes = 64};
  index.tensors = {{"w", "F32", {5, 4}, "", "RaggedShard(dims=1, units=[2, 3])"}, {"c", "U8", {3}, "power 32x32", ""}};
  index.manifest_checksums = {1, 0xffffffffffffffffULL};
  index.facts.texts = {{"config", "[train]\nlr = 1\n\"ß\""}, {"empty", ""}};
  index.facts.integers = {
      {"most", std::numeric_limits<std::int64_t>::max()}, {"least", std::numeric_limits<std::int64_t>::min()}};
  index.facts.numbers = {{"third", 1.0 / 3.0}, {"tiny", 5e-324}, {"whole", 2.0}, {"minus zero", -0.0}};
  return index;
}

Manifest some_manifest() {
  Manifest manifest;
  manifest.files.push_back(
      {.name = shard_name(1, 0, 1), .bytes = 100, .header_bytes = 16, .header_checksum = 3, .pieces = {}});
  manifest.files[0].pieces = {
      {.tensor = "w", .box = {{1, 0}, {4, 4}}, .begin = 16, .checksums = {5}},
      {.tensor = "c", .box = {{0}, {3}}, .begin = 80, .checksums = {6}}};
  manifest.texts = {{"rng", "00ff"}};
  return manifest;
}

TEST(CheckpointFormat, round_trips_are_exact) {
  const CheckpointIndex index = some_index();
  const CheckpointIndex back = index_from_json(to_json(index), "x");
  EXPECT_EQ(back, index);
  EXPECT_TRUE(std::signbit(back.facts.numbers.at("minus zero")));
  EXPECT_EQ(manifest_from_json(to_json(some_manifest()), index, 1, "x"), some_manifest());
}

TEST(CheckpointFormat, is_JSON_for_others_too) {
  const auto json = nlohmann::json::parse(to_json(some_index()));
  EXPECT_EQ(json["content"]["format"], "ragged-checkpoint");
  EXPECT_EQ(json["content"]["tensors"][1]["format"], "power 32x32");
}

TEST(CheckpointFormat, names_of_files) {
  EXPECT_EQ(manifest_name(0), "shard-00001.json");
  EXPECT_EQ(shard_name(1, 0, 3), "shard-00002-model-00001-of-00003.safetensors");
}

TEST(CheckpointFormat, every_flipped_bit_and_every_truncation_is_found) {
  const std::string index = to_json(some_index());
  const std::string manifest = to_json(some_manifest());
  for (std::size_t bit = 0; bit < 8 * index.size(); ++bit) {
    std::string damaged = index;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    EXPECT_CHECKPOINT_ERROR(index_from_json(damaged, "the source"), "the source") << bit;
  }
  for (std::size_t size = 0; size < manifest.size(); ++size) {
    EXPECT_CHECKPOINT_ERROR(manifest_from_json(manifest.substr(0, size), some_index(), 1, "the source"), "the source");
  }
  EXPECT_CHECKPOINT_ERROR(index_from_json(index + "\n", "the source"), "the source");
}

// Well sealed, but wrong: a writer with a fault, or somebody's own tool.
TEST(CheckpointFormat, what_cannot_be_is_refused) {
  const CheckpointIndex index = some_index();
  const auto broken = [&](const auto& change, const std::string& fragment) {
    Manifest manifest = some_manifest();
    change(manifest.files[0]);
    EXPECT_CHECKPOINT_ERROR(manifest_from_json(to_json(manifest), index, 1, "src"), fragment);
  };
  broken([](StoredFile& f) { f.name = "../../etc/passwd"; }, "shard-00002-model-00001-of-00001");
  broken([](StoredFile& f) { f.pieces[0].tensor = "other"; }, "'other'");
  broken([](StoredFile& f) { f.pieces[0].box.offset[0] = 2; }, "inside tensor 'w'");
  broken([](StoredFile& f) { f.pieces[0].box.offset.pop_back(); }, "inside tensor 'w'");
  broken([](StoredFile& f) { f.pieces[0].box.size[0] = std::numeric_limits<Index>::max(); }, "inside tensor 'w'");
  broken([](StoredFile& f) { f.pieces[0].begin = 40; }, "tensor 'w'");
  broken([](StoredFile& f) { f.pieces[0].begin = 3; }, "begin");
  broken([](StoredFile& f) { f.pieces[0].checksums.clear(); }, "a checksum for each 64");
  broken([](StoredFile& f) { f.bytes = 70; }, "in a file of 70 bytes");
  broken([](StoredFile& f) { f.header_bytes = 101; }, "header_bytes");

  const auto refused = [](const auto& change, const std::string& fragment) {
    CheckpointIndex other = some_index();
    change(other);
    EXPECT_CHECKPOINT_ERROR(index_from_json(to_json(other), "src"), fragment);
  };
  refused([](CheckpointIndex& i) { i.world_size = 0; }, "world_size");
  refused([](CheckpointIndex& i) { i.world_size = 1 << 30; }, "world_size");
  refused([](CheckpointIndex& i) { i.world_size = 3; }, "each of 3 ranks");
  refused([](CheckpointIndex& i) { i.chunk_bytes = 0; }, "chunk_bytes");
  refused([](CheckpointIndex& i) { i.step = -1; }, "step");
  refused([](CheckpointIndex& i) { i.tensors[1].name = "w"; }, "'w' twice");
  refused([](CheckpointIndex& i) { i.tensors[1].dtype = "F4"; }, "'F4'");
  refused([](CheckpointIndex& i) { i.tensors[1].shape = {Index{1} << 40, Index{1} << 40}; }, "overflow");
  refused([](CheckpointIndex& i) { i.tensors[0].shape = {Index{1} << 55}; }, "2^56");
}

TEST(CheckpointFormat, numbers_that_JSON_has_not_are_refused) {
  CheckpointIndex index = some_index();
  index.facts.numbers["bad"] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_INVALID(to_json(index), "'bad'");
  index = some_index();
  index.facts.texts["bad"] = "\xff";
  EXPECT_INVALID(to_json(index), "UTF-8");
}

}  // namespace
}  // namespace ragged::checkpoint
