#include "ragged/train/data.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

namespace ragged::train {
namespace {

namespace fs = std::filesystem;

class Data : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::temp_directory_path() / ("ragged_data_" + std::to_string(getpid()) + "_" + test->name());
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  void write(const std::string& name, const std::string& text) const {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << text;
  }
  DataConfig config(Index holdout = 2) const {
    return {.path = folder_.string(), .extensions = {".py"}, .holdout = holdout};
  }

  fs::path folder_;
};

std::string text(const at::Tensor& bytes) {
  const auto* data = static_cast<const char*>(bytes.const_data_ptr());
  return std::string(data, static_cast<std::size_t>(bytes.numel()));
}

template <class F>
std::string message(F run) {
  try {
    run();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

at::Tensor numbers(Index count) {
  return at::arange(count).remainder(251).to(at::kByte);
}

TEST_F(Data, reads_files_in_order_of_their_paths_and_holds_out_every_nth) {
  write("b.py", "bbb");
  write("a/z.py", "zzz");
  write("a/c.py", "ccc");
  write("c.py", "eee");
  write("notes.txt", "no");
  const TextData data = load_text(config(), 2);
  EXPECT_EQ(text(data.train), "cccbbb");
  EXPECT_EQ(text(data.validation), "zzzeee");
  EXPECT_EQ(data.files, 4);
}

TEST_F(Data, without_extensions_reads_every_file) {
  write("a.py", "aaa");
  write("b.txt", "bbb");
  DataConfig all = config();
  all.extensions.clear();
  EXPECT_EQ(text(load_text(all, 2).validation), "bbb");
}

TEST_F(Data, single_file_is_cut_at_its_end) {
  write("a.txt", "0123456789");
  const TextData data = load_text({.path = (folder_ / "a.txt").string(), .holdout = 3}, 2);
  EXPECT_EQ(text(data.train), "0123456");
  EXPECT_EQ(text(data.validation), "789");
}

TEST_F(Data, stops_at_max_bytes) {
  write("a.py", "aaaa");
  write("b.py", "bbbb");
  write("c.py", "cccc");
  DataConfig limited = config();
  limited.max_bytes = 7;
  const TextData data = load_text(limited, 2);
  EXPECT_EQ(text(data.train), "aaaa");
  EXPECT_EQ(text(data.validation), "bbb");
  EXPECT_EQ(data.files, 2);
}

TEST_F(Data, keeps_every_byte_value) {
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
  write("a.py", bytes);
  write("b.py", bytes);
  EXPECT_EQ(text(load_text(config(), 2).train), bytes);
}

TEST_F(Data, fingerprint_tells_texts_and_cuts_apart) {
  write("a.py", "aaaa");
  write("b.py", "bbbb");
  const std::uint64_t before = load_text(config(), 2).fingerprint;
  EXPECT_EQ(before, load_text(config(), 2).fingerprint);
  write("b.py", "bbbc");
  EXPECT_NE(before, load_text(config(), 2).fingerprint);
  write("a.py", "aaa");
  write("b.py", "abbbb");
  EXPECT_NE(before, load_text(config(), 2).fingerprint);
}

TEST_F(Data, missing_path_is_named_with_a_remedy) {
  const std::string error = message([] { load_text({.path = "/nowhere/text"}, 8); });
  EXPECT_NE(error.find("/nowhere/text"), std::string::npos) << error;
  EXPECT_NE(error.find("data.path"), std::string::npos) << error;
}

TEST_F(Data, folder_without_matching_files_is_refused) {
  write("a.txt", "aaaa");
  const std::string error = message([&] { load_text(config(), 2); });
  EXPECT_NE(error.find("data.extensions (.py)"), std::string::npos) << error;
}

TEST_F(Data, too_little_text_is_refused_for_each_part) {
  write("a.py", "12345");
  write("b.py", "1234");
  EXPECT_NO_THROW(load_text(config(), 3));
  std::string error = message([&] { load_text(config(), 4); });
  EXPECT_NE(error.find("more than 4 bytes"), std::string::npos) << error;
  EXPECT_NE(error.find("validation"), std::string::npos) << error;
  error = message([&] { load_text(config(), 5); });
  EXPECT_NE(error.find("for training"), std::string::npos) << error;
}

TEST_F(Data, finds_the_python_standard_library) {
  const TextData data = load_text({.max_bytes = 1 << 20}, 128);
  EXPECT_EQ(data.train.numel() + data.validation.numel(), 1 << 20);
  EXPECT_NE(text(data.train).find("import "), std::string::npos);
}

TEST(Batches, targets_are_the_next_bytes) {
  const Batch batch = training_batch(numbers(1000), 16, 1, {.step = 3, .first = 2, .count = 4});
  ASSERT_EQ(batch.tokens.sizes(), (std::vector<Index>{4, 16}));
  ASSERT_EQ(batch.targets.sizes(), (std::vector<Index>{4, 16}));
  EXPECT_TRUE(at::equal(batch.targets, (batch.tokens + 1).remainder(251)));
}

TEST(Batches, equal_global_batches_hold_equal_sequences_however_they_are_dealt) {
  const at::Tensor bytes = numbers(5000);
  const Index global = 24;
  const Batch whole = training_batch(bytes, 8, 7, {.step = 5, .count = global});
  for (Index parts : {1, 2, 3, 4, 6, 8, 12, 24}) {
    std::vector<at::Tensor> tokens;
    for (Index part = 0; part < parts; ++part) {
      const Index count = global / parts;
      tokens.push_back(training_batch(bytes, 8, 7, {.step = 5, .first = part * count, .count = count}).tokens);
    }
    EXPECT_TRUE(at::equal(at::cat(tokens), whole.tokens)) << parts << " parts";
  }
}

TEST(Batches, seed_step_and_number_each_change_the_sequence) {
  const Index base = sample_offset(1'000'000, 8, 1, 2, 3);
  EXPECT_EQ(base, sample_offset(1'000'000, 8, 1, 2, 3));
  EXPECT_NE(base, sample_offset(1'000'000, 8, 2, 2, 3));
  EXPECT_NE(base, sample_offset(1'000'000, 8, 1, 3, 3));
  EXPECT_NE(base, sample_offset(1'000'000, 8, 1, 2, 4));
}

TEST(Batches, offsets_reach_both_ends_and_never_run_over) {
  const Index size = 20;
  const Index sequence = 16;
  std::vector<int> seen(4);
  for (Index number = 0; number < 200; ++number) {
    const Index offset = sample_offset(size, sequence, 1, 0, number);
    ASSERT_GE(offset, 0);
    ASSERT_LE(offset + sequence, size - 1);
    ++seen[static_cast<std::size_t>(offset)];
  }
  for (int count : seen) EXPECT_GT(count, 0);
}

TEST(Batches, shortest_text_has_one_sequence) {
  const Batch batch = training_batch(numbers(9), 8, 1, {.count = 2});
  EXPECT_TRUE(at::equal(batch.tokens[0], at::arange(8)));
  EXPECT_TRUE(at::equal(batch.targets[1], at::arange(1, 9)));
}

TEST(Batches, validation_spans_the_text_and_wraps) {
  const at::Tensor bytes = numbers(200);
  const Batch all = validation_batch(bytes, 8, 5, 0, 5);
  EXPECT_EQ(all.tokens[0][0].item<Index>(), 0);
  EXPECT_EQ(all.targets[4][7].item<Index>(), 199);
  const Batch tail = validation_batch(bytes, 8, 5, 4, 2);
  EXPECT_TRUE(at::equal(tail.tokens[0], all.tokens[4]));
  EXPECT_TRUE(at::equal(tail.tokens[1], all.tokens[0]));
}

}  // namespace
}  // namespace ragged::train
