// Headers as they should be, and every way in which a stranger's file may be damaged.
#include "ragged/sim/safetensors_header.h"

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/sim/files.h"
#include "tests/support/expect_error.h"

namespace ragged::sim {
namespace {

using ::ragged::testing::safetensors_file;
using ::ragged::testing::TempFolder;

constexpr const char* kTwo =
    R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[8,32]},)"
    R"("a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}})";

std::vector<StoredTensor> parse(const std::string& header, std::size_t data = 32) {
  const std::string file = safetensors_file(header, data);
  return parse_safetensors(file, file.size(), "x.safetensors");
}

TEST(SafetensorsHeader, tensors_come_in_the_order_of_their_bytes) {
  const std::vector<StoredTensor> tensors = parse(kTwo);
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[0], (StoredTensor{"a", "BF16", {4}}));
  EXPECT_EQ(tensors[1], (StoredTensor{"b", "F32", {2, 3}}));
}

TEST(SafetensorsHeader, scalars_empty_tensors_and_no_tensors_are_fine) {
  EXPECT_TRUE(parse("{}", 0).empty());
  EXPECT_EQ(parse(R"({"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4).size(), 1u);
  EXPECT_EQ(parse(R"({"s":{"dtype":"F32","shape":[0,7],"data_offsets":[0,0]}})", 0).size(), 1u);
  EXPECT_EQ(parse(R"({"s":{"dtype":"NEW","shape":[7],"data_offsets":[0,3]}})", 3).size(), 1u);
  EXPECT_EQ(parse(R"({"s":{"dtype":"F4","shape":[3,2],"data_offsets":[0,3]}})", 3).size(), 1u);
}

TEST(SafetensorsHeader, truncated_files_are_named) {
  const std::string whole = safetensors_file(kTwo, 32);
  for (const std::size_t size : std::vector<std::size_t>{0, 3, 7}) {
    EXPECT_INVALID(parse_safetensors(whole.substr(0, size), size, "x.safetensors"), "at least 8 bytes");
  }
  for (const std::size_t size : std::vector<std::size_t>{8, 20, whole.size() - 33}) {
    EXPECT_INVALID(parse_safetensors(whole.substr(0, size), size, "x.safetensors"), "truncated");
  }
  EXPECT_INVALID(parse_safetensors(whole.substr(0, whole.size() - 1), whole.size() - 1, "x.st"), "is truncated");
  EXPECT_INVALID(parse_safetensors(whole + "x", whole.size() + 1, "x.st"), "is damaged");
}

TEST(SafetensorsHeader, a_length_is_capped_before_it_is_trusted) {
  const std::string huge = std::string("\xff\xff\xff\xff\xff\xff\xff\x7f", 8) + "{}";
  EXPECT_INVALID(parse_safetensors(huge, huge.size(), "x.st"), "at most 100000000 bytes");
  EXPECT_INVALID(parse_safetensors(std::string(8, '\x01') + "{}", std::uint64_t{1} << 62, "x.st"), "at most 100000000");
}

TEST(SafetensorsHeader, damaged_headers_are_named) {
  EXPECT_INVALID(parse("{"), "x.safetensors");
  EXPECT_INVALID(parse("[]"), "named tensors");
  EXPECT_INVALID(parse(std::string(5000, '[')), "x.safetensors");
  EXPECT_INVALID(parse(R"({"a":3})"), "a");
  EXPECT_INVALID(parse(R"({"a":{"shape":[1],"data_offsets":[0,4]}})"), "dtype");
  EXPECT_INVALID(parse(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})"), "-1");
  EXPECT_INVALID(parse(R"({"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})"), "a");
  EXPECT_INVALID(parse(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})"), "two data_offsets");
  EXPECT_INVALID(parse(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})"), "data_offsets 4 to 0");
  EXPECT_INVALID(parse(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4), "Expected 8 bytes");
  EXPECT_INVALID(
      parse(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}})", 4), "at most 2^56");
  EXPECT_INVALID(
      parse(
          R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
          6),
      "overlaps");
  EXPECT_INVALID(
      parse(
          R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[1],"data_offsets":[5,6]}})",
          6),
      "1 unused bytes before 'b'");
  EXPECT_INVALID(parse(R"({"__metadata__":{"a":1}})", 0), "__metadata__.a");
  EXPECT_INVALID(
      parse(
          R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
          8),
      "'a' twice");
}

TEST(SafetensorsHeader, a_file_is_read_up_to_its_header) {
  const TempFolder folder;
  folder.write("model.safetensors", safetensors_file(kTwo, 32));
  EXPECT_EQ(read_safetensors(folder.path("model.safetensors")).size(), 2u);
  EXPECT_INVALID(read_safetensors(folder.path("nowhere.safetensors")), "nowhere.safetensors");
  EXPECT_INVALID(read_safetensors(folder.path("")), "Expected a file");
}

TEST(SafetensorsHeader, an_index_finds_its_files) {
  const TempFolder folder;
  folder.write("one.safetensors", safetensors_file(kTwo, 32));
  folder.write("two.safetensors", safetensors_file(R"({"c":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8));
  const auto index = [&](const std::string& map) {
    folder.write("model.safetensors.index.json", R"({"metadata":{},"weight_map":)" + map + "}");
    return read_safetensors_index(folder.path("model.safetensors.index.json"));
  };
  EXPECT_EQ(index(R"({"a":"one.safetensors","b":"one.safetensors","c":"two.safetensors"})").size(), 3u);
  EXPECT_INVALID(index(R"({"a":"three.safetensors"})"), "three.safetensors");
  EXPECT_INVALID(index(R"({"x":"one.safetensors"})"), "'x' in 'one.safetensors'");
  EXPECT_INVALID(index(R"({"x":"../one.safetensors"})"), "beside the index");
  EXPECT_INVALID(index(R"({"x":3})"), "beside the index");
  EXPECT_INVALID(index("{}"), "Expected tensors");
  EXPECT_INVALID(index("[]"), "weight_map");
}

}  // namespace
}  // namespace ragged::sim
