#include "ragged/plan/plan_json.h"

#include <array>

#include "ragged/plan/planner.h"
#include "tests/plan/plans.h"
#include "tests/support/expect_error.h"

namespace ragged::plan {
namespace {

using ::ragged::testing::hand_written_plan;
using ::ragged::testing::random_bucket;
using ::ragged::testing::random_options;
using ::ragged::testing::Seeded;

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t position = text.find(from);
  EXPECT_NE(position, std::string::npos) << from;
  return text.replace(position, from.size(), to);
}

// The head of a plan for `world_size` ranks without parameters, to be followed by segments.
std::string head(const std::string& world_size) {
  return R"({"format": 1, "world_size": )" + world_size +
      R"(, "collective_unit": 1, "start_alignment": 1, "lower_bound": 0, "params": [], "segments": )";
}

constexpr const char* kEmptySegment =
    R"({"kind": "uniform", "image_offset": 0, "numel": 0, "shard_size": 0, "trainable": true, "params": []})";

TEST(PlanJson, brings_a_plan_back) {
  const BucketPlan plan = hand_written_plan();
  EXPECT_EQ(plan_from_json(to_json(plan)), plan);
  EXPECT_EQ(plan_from_json(to_json(BucketPlan{})), BucketPlan{});
}

TEST(PlanJson, brings_random_plans_back) {
  constexpr std::uint64_t kSeed = 4;
  Seeded random(kSeed);
  for (int trial = 0; trial < 300; ++trial) {
    const BucketPlan plan = plan_bucket(random_bucket(random), random_options(random));
    ASSERT_EQ(plan_from_json(to_json(plan)), plan) << "seed " << kSeed << ", trial " << trial;
  }
}

TEST(PlanJson, keeps_unusual_names) {
  BucketPlan plan = hand_written_plan();
  plan.params[0].name = "a \"quoted\"\n\\ name \xE2\x88\x91";
  EXPECT_EQ(plan_from_json(to_json(plan)), plan);
}

TEST(PlanJson, refuses_names_that_json_cannot_hold) {
  BucketPlan plan = hand_written_plan();
  plan.params[0].name = "\xff\xfe";
  EXPECT_INVALID(to_json(plan), "UTF-8");
  plan = hand_written_plan();
  plan.starts.pop_back();
  EXPECT_INVALID(to_json(plan), "6 starts");
}

TEST(PlanJson, refuses_text_that_ends_early) {
  const std::string text = to_json(hand_written_plan());
  for (std::size_t size = 0; size < text.size(); ++size) {
    EXPECT_INVALID(plan_from_json(text.substr(0, size)), "Expected JSON") << size << " bytes";
  }
  EXPECT_INVALID(plan_from_json(text + "x"), "Expected JSON");
}

TEST(PlanJson, refuses_other_formats) {
  const std::string text = to_json(hand_written_plan());
  EXPECT_INVALID(plan_from_json(replaced(text, R"("format": 1)", R"("format": 2)")), "format 1, but got 2");
  EXPECT_INVALID(plan_from_json(replaced(text, R"("format": 1)", R"("format": "1")")), "at plan.format");
  EXPECT_INVALID(plan_from_json("{}"), "a member 'format' at plan");
  EXPECT_INVALID(plan_from_json("[]"), "an object at plan, but got array");
  EXPECT_INVALID(plan_from_json("7"), "an object at plan");
}

TEST(PlanJson, refuses_wrong_types_and_values_and_says_where) {
  const std::string text = to_json(hand_written_plan());
  const std::vector<std::array<std::string, 3>> damages{
      {R"("world_size": 3)", R"("world_size": "3")", "an integer at plan.world_size"},
      {R"("world_size": 3)", R"("world_size": 3.5)", "an integer at plan.world_size"},
      {R"("world_size": 3)", R"("world_size": null)", "an integer at plan.world_size"},
      {R"("world_size": 3)", R"("world_size": true)", "an integer at plan.world_size"},
      {R"("world_size": 3)", R"("world_size": [3])", "an integer at plan.world_size"},
      {R"("world_size": 3)", R"("world_size": 0)", "from 1 to 1048576 at plan.world_size"},
      {R"("world_size": 3)", R"("world_size": -3)", "but got -3"},
      {R"("world_size": 3)", R"("world_size": 1048577)", "but got 1048577"},
      {R"("world_size": 3)", R"("world_size": 18446744073709551615)", "but got 18446744073709551615"},
      {R"("world_size": 3)", R"("world_size": 1e3)", "an integer at plan.world_size"},
      {R"("world_size": 3)", R"("world_sise": 3)", "a member 'world_size' at plan"},
      {R"("world_size": 3)", R"("world_size": 4)", "4 intervals at plan.segments[1].owners, one a rank, but got 3"},
      {R"("collective_unit": 2)", R"("collective_unit": 0)", "at plan.collective_unit"},
      {R"("start_alignment": 1)", R"("start_alignment": -1)", "at plan.start_alignment"},
      {R"("lower_bound": 0)", R"("lower_bound": -1)", "at plan.lower_bound"},
      {R"("lower_bound": 0)", R"("lower_bound": 0, "more": 1)", "7 members at plan, but got 8"},
      {R"("name": "w")", R"("name": 7)", "a string at plan.params[0].name"},
      {R"("block": 2)", R"("block": 0)", "at plan.params[0].block"},
      {R"("block": 2)", R"("block": 4)", "inside a block of 4"},
      {R"("restart": 0)", R"("restart": -1)", "at plan.params[0].restart"},
      {R"("trainable": true)", R"("trainable": 1)", "true or false at plan.params[0].trainable"},
      {R"("start": 13)", R"("start": -13)", "at plan.params[1].start"},
      {R"("start": 13)", R"("start": 9223372036854775807)", "param 'b'"},
      {R"("start": 13)", R"("start": 13, "more": 1)", "6 members at plan.params[1], but got 7"},
      {R"("kind": "ragged")", R"("kind": "rugged")", "at plan.segments[1].kind, but got 'rugged'"},
      {R"("kind": "ragged")", R"("kind": 1)", "a string at plan.segments[1].kind"},
      {R"("kind": "ragged")", R"("kind": "uniform")", "6 members at plan.segments[1], but got 7"},
      {R"("kind": "uniform")", R"("kind": "ragged")", "7 members at plan.segments[0], but got 6"},
      {R"("numel": 18)", R"("numel": -18)", "at plan.segments[0].numel"},
      {R"("numel": 18)", R"("numel": 9223372036854775807)", "segment 1 at 9223372036854775807"},
      {R"("shard_size": 6)", R"("shard_size": 9223372036854775806)", "at plan.segments[0]"},
      {R"("image_offset": 18)", R"("image_offset": 17)", "segment 1 at 18, but got 17"},
  };
  for (const auto& [from, to, reason] : damages) {
    SCOPED_TRACE(to);
    EXPECT_INVALID(plan_from_json(replaced(text, from, to)), reason);
  }
}

TEST(PlanJson, refuses_wrong_arrays) {
  // On one line, so that arrays can be found as text.
  const std::string params =
      R"([{"name": "w", "shape": [4], "block": 1, "restart": 0, "trainable": true, "start": 0}])";
  const std::string segments =
      R"([{"kind": "ragged", "image_offset": 0, "numel": 4, "shard_size": 0, "trainable": true, "params": [0], "owners": [[0, 1], [1, 4]]}])";
  const std::string text =
      R"({"format": 1, "world_size": 2, "collective_unit": 1, "start_alignment": 1, "lower_bound": 0, "params": )" +
      params + R"(, "segments": )" + segments + "}";
  EXPECT_EQ(plan_from_json(text).placement(0), layout::RaggedShard(1, {1, 3}));
  const std::vector<std::array<std::string, 3>> damages{
      {"[4]", "4", "an array at plan.params[0].shape"},
      {"[4]", "[-4]", "at plan.params[0].shape[0]"},
      {"[4]", "[4.0]", "an integer at plan.params[0].shape[0]"},
      {"[4]", "[9223372036854775807, 9223372036854775807]", "2^63"},
      {"[4]", "[5]", "param 'w'"},
      {"[0]", "[1]", "from 0 to 0 at plan.segments[0].params[0], but got 1"},
      {"[0]", "[0, 0]", "param 'w'"},
      {"[0]", "[18446744073709551615]", "at plan.segments[0].params[0]"},
      {"[0]", "[]", "no padding in a ragged segment, but got 4 elements"},
      {"[0]", "{}", "an array at plan.segments[0].params"},
      {"[1, 4]]", "[1, 4], [4, 4]]", "2 intervals at plan.segments[0].owners, one a rank, but got 3"},
      {"[1, 4]]", "[1, 4, 5]]", "two integers at plan.segments[0].owners[1], but got 3"},
      {"[1, 4]]", "[1]]", "two integers"},
      {"[1, 4]]", "7]", "an array at plan.segments[0].owners[1]"},
      {"[1, 4]]", "[1, 5]]", "within [0, 4)"},
      {params, "{}", "an array at plan.params"},
      {params, "[7]", "an object at plan.params[0]"},
      {params, "[]", "plan.segments[0].params[0]"},
      {segments, "[null]", "an object at plan.segments[0], but got null"},
  };
  for (const auto& [from, to, reason] : damages) {
    SCOPED_TRACE(to);
    EXPECT_INVALID(plan_from_json(replaced(text, from, to)), reason);
  }
}

TEST(PlanJson, refuses_small_texts_that_ask_for_huge_plans) {
  EXPECT_INVALID(plan_from_json(head("2000000000") + "[" + kEmptySegment + "]}"), "at plan.world_size");
  std::string segments = kEmptySegment;
  for (int i = 0; i < 16; ++i) segments += std::string(", ") + kEmptySegment;
  EXPECT_INVALID(
      plan_from_json(head("1048576") + "[" + segments + "]}"), "at most 16 segments for 1048576 ranks, but got 17");
}

TEST(PlanJson, refuses_deep_nesting_without_harm) {
  EXPECT_INVALID(plan_from_json(std::string(100000, '[')), "16 levels of nesting");
  const std::string deep = std::string(100000, '[') + std::string(100000, ']');
  EXPECT_INVALID(plan_from_json(deep), "16 levels");
  EXPECT_INVALID(plan_from_json(head(deep) + "[]}"), "16 levels");
}

TEST(PlanJson, survives_random_damage) {
  constexpr std::uint64_t kSeed = 8;
  Seeded random(kSeed);
  const std::string text = to_json(hand_written_plan());
  int num_refused = 0;
  for (int trial = 0; trial < 4000; ++trial) {
    std::string damaged = text;
    for (Index i = random.between(1, 3); i > 0; --i) {
      const auto position = static_cast<std::size_t>(random.between(0, static_cast<Index>(text.size()) - 1));
      damaged[position] = random.pick(std::vector<char>{'0', '9', '-', ',', '[', '}', '"', 'e', '\0', '\xff'});
    }
    try {
      validate(plan_from_json(damaged));
    } catch (const InvalidArgument&) {
      ++num_refused;  // anything else ends the test
    }
  }
  EXPECT_GT(num_refused, 2000);
}

}  // namespace
}  // namespace ragged::plan
