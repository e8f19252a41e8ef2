// Folders of models written and read, and everything that can be wrong with one.
#include "ragged/checkpoint/model_files.h"

#include <map>
#include <string>

#include <nlohmann/json.hpp>

#include "ragged/plan/safetensors_index.h"
#include "tests/checkpoint/files.h"
#include "tests/support/expect_error.h"

namespace ragged::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::ragged::testing::CheckpointFolder;
using ::ragged::testing::WholeTensor;

// Hands a tensor over in parts of 1, 2, 3, ... bytes.
GiveTensor in_odd_parts(const std::vector<WholeTensor>& tensors) {
  return [&tensors](std::size_t i, const TakeBytes& take) {
    Bytes rest(tensors[i].bytes);
    for (std::size_t size = 1; !rest.empty(); ++size) {
      const Bytes part = rest.first(std::min(size, rest.size()));
      take(part);
      rest = rest.subspan(part.size());
    }
  };
}

WrittenModel write(const fs::path& folder, const std::vector<WholeTensor>& tensors, Index max_file_bytes) {
  std::vector<plan::SafetensorsEntry> entries;
  for (const WholeTensor& tensor : tensors) {
    entries.push_back({.name = tensor.info.name, .dtype = tensor.info.dtype, .shape = tensor.info.shape});
  }
  return write_model_files(folder, entries, in_odd_parts(tensors), {.max_file_bytes = max_file_bytes});
}

void expect_holds(const fs::path& folder, const std::vector<WholeTensor>& tensors) {
  const ModelFiles model = ModelFiles::open(folder);
  ASSERT_EQ(model.names().size(), tensors.size());
  Index total = 0;
  for (const WholeTensor& tensor : tensors) {
    const plan::SafetensorsEntry* entry = model.find(tensor.info.name);
    ASSERT_TRUE(entry) << tensor.info.name;
    EXPECT_EQ(entry->dtype, tensor.info.dtype);
    EXPECT_EQ(entry->shape, tensor.info.shape);
    std::vector<std::byte> bytes(tensor.bytes.size());
    model.read(tensor.info.name, 0, bytes);
    EXPECT_EQ(bytes, tensor.bytes) << tensor.info.name;
    if (bytes.size() > 2) {
      std::vector<std::byte> part(bytes.size() - 2);
      model.read(tensor.info.name, 1, part);
      EXPECT_EQ(part, std::vector<std::byte>(tensor.bytes.begin() + 1, tensor.bytes.end() - 1));
    }
    total += static_cast<Index>(bytes.size());
  }
  EXPECT_EQ(model.bytes(), total);
  EXPECT_EQ(model.find("nobody"), nullptr);
}

TEST(ModelFiles, what_is_written_is_read_in_any_number_of_files) {
  const std::vector<WholeTensor> tensors = testing::some_tensors();
  std::size_t most = 0;
  for (const Index limit : {Index{1}, Index{100}, Index{333}, Index{1} << 40}) {
    SCOPED_TRACE(limit);
    const CheckpointFolder folder;
    const WrittenModel written = write(folder.path(), tensors, limit);
    expect_holds(folder.path(), tensors);
    most = std::max(most, written.files.size());
    EXPECT_EQ(fs::exists(folder / kModelIndexFile), written.files.size() > 1);
    for (const std::string& file : written.files) {
      const SafetensorsReader reader(folder / file);
      EXPECT_EQ(reader.metadata().at("format"), "pt");
      Index bytes = 0;
      for (const auto& entry : reader.tensors()) bytes += entry.end - entry.begin;
      EXPECT_TRUE(bytes <= limit || reader.tensors().size() == 1) << file;
    }
    if (limit > Index{1} << 30) {
      EXPECT_EQ(written.files, (std::vector<std::string>{"model.safetensors"}));
    }
  }
  EXPECT_GT(most, 4u);
}

TEST(ModelFiles, the_index_is_as_others_expect_it) {
  const CheckpointFolder folder;
  const std::vector<WholeTensor> tensors = {
      testing::whole_tensor("b", "F32", {3}), testing::whole_tensor("a", "BF16", {5, 1})};
  const WrittenModel written = write(folder.path(), tensors, 12);
  EXPECT_EQ(
      written.files,
      (std::vector<std::string>{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}));
  const auto json = nlohmann::json::parse(testing::read_bytes(folder / kModelIndexFile));
  EXPECT_EQ(json["metadata"]["total_size"], 22);
  EXPECT_EQ(written.bytes, 22);
  EXPECT_EQ(json["weight_map"]["a"], "model-00002-of-00002.safetensors");
  EXPECT_EQ(json["weight_map"]["b"], "model-00001-of-00002.safetensors");
  EXPECT_EQ(json["weight_map"].size(), 2u);
}

TEST(ModelFiles, writing_needs_different_names_whole_bytes_and_all_of_them) {
  const CheckpointFolder folder;
  EXPECT_INVALID(
      write(folder.path(), {testing::whole_tensor("x", "U8", {1}), testing::whole_tensor("x", "U8", {2})}, 100),
      "'x' twice");
  EXPECT_INVALID(write(folder.path(), {testing::whole_tensor("x", "U8", {1})}, 0), "max_file_bytes");
  const std::vector<plan::SafetensorsEntry> entries = {{.name = "x", .dtype = "F32", .shape = {2}}};
  const std::string seven(7, 'a');
  const std::string nine(9, 'a');
  EXPECT_THROW(
      write_model_files(folder.path(), entries, [&](std::size_t, const TakeBytes& take) { take(as_bytes(seven)); }),
      InternalError);
  EXPECT_THROW(
      write_model_files(folder.path(), entries, [&](std::size_t, const TakeBytes& take) { take(as_bytes(nine)); }),
      InternalError);
  EXPECT_INVALID(write_model_files(folder.path(), {{.name = "x", .dtype = "F4", .shape = {2}}}, {}), "'F4'");
}

// --- folders that aren't models ---

TEST(ModelFiles, folders_without_weights_say_what_they_lack) {
  const CheckpointFolder folder;
  EXPECT_CHECKPOINT_ERROR(ModelFiles::open(folder.path()), "got neither. Is it the folder");
  EXPECT_CHECKPOINT_ERROR(ModelFiles::open(folder / "nowhere"), "nowhere");
  testing::write_bytes(folder / "pytorch_model.bin", "x");
  EXPECT_CHECKPOINT_ERROR(ModelFiles::open(folder.path()), "pickled");
}

TEST(ModelFiles, one_file_goes_before_an_index) {
  const CheckpointFolder folder;
  const std::vector<WholeTensor> tensors = {testing::whole_tensor("x", "U8", {3})};
  write(folder.path(), tensors, 100);
  testing::write_bytes(folder / kModelIndexFile, "no JSON");
  expect_holds(folder.path(), tensors);
}

class Damaged : public ::testing::Test {
 protected:
  void SetUp() override {
    write(folder_.path(), {testing::whole_tensor("x", "F32", {3}), testing::whole_tensor("y", "U8", {5})}, 1);
    index_ = nlohmann::json::parse(testing::read_bytes(folder_ / kModelIndexFile));
  }
  void put_index() { testing::write_bytes(folder_ / kModelIndexFile, index_.dump()); }

  CheckpointFolder folder_;
  nlohmann::json index_;
  const std::string first_ = "model-00001-of-00002.safetensors";
  const std::string second_ = "model-00002-of-00002.safetensors";
};

TEST_F(Damaged, a_missing_file_is_named) {
  fs::remove(folder_ / second_);
  EXPECT_CHECKPOINT_ERROR(ModelFiles::open(folder_.path()), second_);
}

TEST_F(Damaged, every_truncation_of_a_file_is_named) {
  const std::string whole = testing::read_bytes(folder_ / first_);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    testing::write_bytes(folder_ / first_, whole.substr(0, size));
    EXPECT_CHECKPOINT_ERROR(ModelFiles::open(folder_.path()), first_);
  }
}

TEST_F(Damaged, a_header_beyond_the_limit_is_refused_unread) {
  std::string bytes = testing::read_bytes(folder_ / first_);
  bytes[4] = 1;  // 4 GiB
  testing::write_bytes(folder_ / first_, bytes);
  EXPECT_CHECKPOINT_ERROR(ModelFiles::open(folder_.path()), "at most 100000000 bytes");
}

TEST_F(Damaged, tensors_that_the_index_has_and_no_file) {
  index_["weight_map"]["z"] = first_;
  put_index();
  EXPECT_CHECKPOINT_ERROR(ModelFiles::open(folder_.path()), "Expected tensor 'z' in");
}

TEST_F(Damaged, tensors_in_another_file_than_the_index_says) {
  index_["weight_map"]["x"] = second_;
  index_["weight_map"]["y"] = first_;
  put_index();
  EXPECT_CHECKPOINT_ERROR(ModelFiles::open(folder_.path()), "Expected tensor 'x' in");
}

TEST_F(Damaged, tensors_that_a_file_has_and_the_index_not) {
  write(folder_.path(), {testing::whole_tensor("x", "F32", {3}), testing::whole_tensor("extra", "U8", {1})}, 100);
  fs::rename(folder_ / kModelFile, folder_ / first_);
  EXPECT_CHECKPOINT_ERROR(ModelFiles::open(folder_.path()), "lacks 'extra'");
}

TEST_F(Damaged, a_tensor_in_two_files) {
  fs::copy_file(folder_ / first_, folder_ / "copy.safetensors");
  index_["weight_map"]["z"] = "copy.safetensors";
  put_index();
  EXPECT_CHECKPOINT_ERROR(ModelFiles::open(folder_.path()), "Expected each tensor in one file, but 'x'");
}

TEST_F(Damaged, an_index_of_another_kind_is_named) {
  for (const std::string text :
       {"", "{", "[]", "{}", R"({"weight_map":3})", R"({"weight_map":{}})", R"({"weight_map":{"x":3}})",
        R"({"weight_map":{"x":"../x"}})", R"({"weight_map":{"x":"/etc/passwd"}})", R"({"weight_map":{"x":".."}})",
        R"({"weight_map":{"x":""}})", R"({"weight_map":{"x":"a\u0000b"}})", R"({"weight_map":{"x":"a","x":"b"}})",
        R"({"weight_map":{"x":"a"},"weight_map":{"y":"a"}})", R"({"weight_map":{"x":[[[[[[[[[[]]]]]]]]]]}})"}) {
    testing::write_bytes(folder_ / kModelIndexFile, text);
    EXPECT_CHECKPOINT_ERROR(ModelFiles::open(folder_.path()), kModelIndexFile) << text;
  }
}

TEST(SafetensorsIndex, comes_back) {
  const std::map<std::string, std::string> files = {{"a.\"b", "one"}, {"c\n", "two.safetensors"}};
  EXPECT_EQ(plan::parse_safetensors_index(plan::write_safetensors_index(files, 3), "x"), files);
  EXPECT_INVALID(plan::write_safetensors_index({{"\xff", "one"}}, 3), "UTF-8");
  // What stands beside the map may repeat names of tensors.
  EXPECT_EQ(
      plan::parse_safetensors_index(R"({"weight_map":{"a":"f"},"metadata":{"a":1},"b":{"a":1}})", "x").size(), 1u);
}

// --- folders that appear at once ---

TEST(NewFolder, appears_with_what_was_written) {
  const CheckpointFolder parent;
  for (const std::string name : {"out", "deep/er/out", "trailing/"}) {
    NewFolder folder(parent.path() / name);
    write_file(folder.temporary() / "a", "x");
    EXPECT_FALSE(fs::exists(parent / name));
    folder.publish();
    EXPECT_EQ(testing::read_bytes(parent.path() / name / "a"), "x");
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(parent.path()), {}), 3);  // no temporary one is left
}

TEST(NewFolder, what_isnt_published_is_gone) {
  const CheckpointFolder parent;
  {
    const NewFolder folder(parent / "out");
    write_file(folder.temporary() / "a", "x");
  }
  EXPECT_TRUE(fs::is_empty(parent.path()));
}

TEST(NewFolder, is_written_by_one_at_a_time_and_sweeps_what_was_left) {
  const CheckpointFolder parent;
  fs::create_directories(parent / ".tmp-out/deep");
  write_file(parent / ".tmp-out" / "left", "x");
  {
    const NewFolder first(parent / "out");
    EXPECT_TRUE(fs::is_empty(first.temporary()));
    write_file(first.temporary() / "a", "x");
    EXPECT_CHECKPOINT_ERROR(NewFolder(parent / "out"), "another process is at it");
    EXPECT_TRUE(fs::exists(first.temporary() / "a"));
  }
  NewFolder again(parent / "out");
  again.publish();
  EXPECT_TRUE(fs::is_directory(parent / "out"));
}

TEST(NewFolder, nothing_is_overwritten) {
  const CheckpointFolder parent;
  fs::create_directories(parent / "full");
  write_file(parent / "full" / "a", "x");
  write_file(parent / "file", "x");
  EXPECT_CHECKPOINT_ERROR(NewFolder(parent / "full"), "Nothing is overwritten");
  EXPECT_CHECKPOINT_ERROR(NewFolder(parent / "full/"), "Nothing is overwritten");
  EXPECT_CHECKPOINT_ERROR(NewFolder(parent / "file"), "Nothing is overwritten");
  EXPECT_CHECKPOINT_ERROR(NewFolder(parent / "file" / "below"), "file");
  fs::create_directories(parent / "empty");
  NewFolder folder(parent / "empty");
  write_file(parent / "empty" / "late", "x");  // somebody else's
  EXPECT_CHECKPOINT_ERROR(folder.publish(), "empty");
  EXPECT_EQ(testing::read_bytes(parent / "empty" / "late"), "x");
}

}  // namespace
}  // namespace ragged::checkpoint
