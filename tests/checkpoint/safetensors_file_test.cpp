// One file written and read; the header by itself is tested in tests/sim.
#include "ragged/checkpoint/safetensors_file.h"

#include "tests/checkpoint/files.h"
#include "tests/support/expect_error.h"

namespace ragged::checkpoint {
namespace {

using ::ragged::testing::CheckpointFolder;

TEST(SafetensorsFile, what_is_written_is_read_and_aligned) {
  const CheckpointFolder folder;
  const auto path = folder / "a.safetensors";
  const std::vector<plan::SafetensorsEntry> tensors = lay_out(
      {{.name = "codes", .dtype = "U8", .shape = {3}},
       {.name = "half", .dtype = "BF16", .shape = {3}},
       {.name = "none", .dtype = "F32", .shape = {0, 4}},
       {.name = "wide", .dtype = "F64", .shape = {}},
       {.name = "q\"uote\nß", .dtype = "F32", .shape = {1, 1}}});
  SafetensorsWriter writer(path, tensors, {{"format", "pt"}, {"note", "\"x\""}});
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(writer.file_offset(i) % dtype_bytes(tensors[i].dtype), 0) << tensors[i].name;
    bytes.assign(static_cast<std::size_t>(tensors[i].end - tensors[i].begin), static_cast<std::byte>(i + 1));
    writer.write(i, bytes);
  }
  writer.finish();

  const SafetensorsReader reader(path);
  EXPECT_EQ(reader.tensors(), tensors);
  EXPECT_EQ(reader.metadata(), (std::map<std::string, std::string>{{"format", "pt"}, {"note", "\"x\""}}));
  EXPECT_EQ(reader.header_checksum(), writer.header_checksum());
  EXPECT_EQ(static_cast<Index>(std::filesystem::file_size(path)), writer.file_bytes());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::vector<std::byte> back(static_cast<std::size_t>(tensors[i].end - tensors[i].begin));
    reader.read(reader.tensors()[i], 0, back);
    EXPECT_TRUE(std::ranges::all_of(back, [&](std::byte b) { return b == static_cast<std::byte>(i + 1); }));
  }
}

TEST(SafetensorsFile, a_part_of_a_tensor_is_read) {
  const CheckpointFolder folder;
  const auto tensors = lay_out({{.name = "x", .dtype = "U8", .shape = {5}}});
  SafetensorsWriter writer(folder / "a", tensors, {});
  writer.write(0, as_bytes("abcde"));
  writer.finish();
  std::string part(3, ' ');
  SafetensorsReader(folder / "a").read(tensors[0], 1, std::as_writable_bytes(std::span(part)));
  EXPECT_EQ(part, "bcd");
}

TEST(SafetensorsFile, every_truncation_is_named) {
  const CheckpointFolder folder;
  const auto tensors =
      lay_out({{.name = "x", .dtype = "U8", .shape = {5}}, {.name = "y", .dtype = "F32", .shape = {2}}});
  SafetensorsWriter writer(folder / "a", tensors, {});
  for (std::size_t i = 0; i < 2; ++i) {
    writer.write(i, std::vector<std::byte>(static_cast<std::size_t>(tensors[i].end - tensors[i].begin)));
  }
  writer.finish();
  const std::string whole = testing::read_bytes(folder / "a");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    testing::write_bytes(folder / "b", whole.substr(0, size));
    EXPECT_CHECKPOINT_ERROR(SafetensorsReader(folder / "b"), (folder / "b").string()) << size;
  }
}

TEST(SafetensorsFile, dtypes_without_whole_bytes_and_names_that_are_no_text_are_refused) {
  const CheckpointFolder folder;
  EXPECT_INVALID(lay_out({{.name = "x", .dtype = "F4", .shape = {2}}}), "'F4'");
  EXPECT_INVALID(lay_out({{.name = "x", .dtype = "", .shape = {2}}}), "tensor 'x'");
  EXPECT_INVALID(
      SafetensorsWriter(folder / "a", lay_out({{.name = "\xff", .dtype = "U8", .shape = {0}}}), {}), "UTF-8");
}

TEST(Checksum, is_XXH3_and_finds_every_flipped_bit) {
  EXPECT_EQ(to_hex(checksum({})), "2d06800538d394c2");  // of nothing, as `xxhsum -H3` prints it
  std::string text = "the boxes of a tensor, in row-major order; long enough for each of the three routes";
  for (std::size_t size : {std::size_t{1}, std::size_t{9}, std::size_t{40}, text.size()}) {
    const std::uint64_t sum = checksum(as_bytes(text.substr(0, size)));
    for (std::size_t bit = 0; bit < 8 * size; ++bit) {
      std::string other = text.substr(0, size);
      other[bit / 8] = static_cast<char>(other[bit / 8] ^ (1 << bit % 8));
      EXPECT_NE(checksum(as_bytes(other)), sum) << bit;
    }
  }
}

TEST(Checksum, hexadecimal_is_read_strictly) {
  EXPECT_EQ(from_hex(to_hex(0xfedcba9876543210ULL), "x"), 0xfedcba9876543210ULL);
  for (const char* bad : {"", "1", "00000000000000001", "000000000000000G", "000000000000000A", "-000000000000001"}) {
    EXPECT_CHECKPOINT_ERROR(from_hex(bad, "the place"), "the place") << bad;
  }
}

}  // namespace
}  // namespace ragged::checkpoint
