// What the search finds, and that it says why.
#include "ragged/sim/tune.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/support/expect_error.h"

namespace ragged::sim {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

constexpr double kGiB = 1024.0 * 1024 * 1024;

const GroupRow& group(const TuneResult& result, int shard) {
  for (const GroupRow& row : result.groups) {
    if (row.shard == shard) return row;
  }
  throw InternalError("no such group");
}

TEST(Tune, more_layers_a_bucket_and_other_group_sizes_are_found) {
  const Model model = load_model("llama-3-70b");
  const TuneResult result = tune(model, {.ranks = 1024, .policy = {.rows = 16}});
  ASSERT_TRUE(result.fits);
  EXPECT_LE(group(result, 1024).padding[0], 0.096);
  EXPECT_LE(group(result, 1024).padding[1], 0.020);
  EXPECT_LE(group(result, 1024).padding[2], 0.0031);
  EXPECT_LE(group(result, 64).padding[0], 0.0002);
  EXPECT_THAT(result.neighbours, Contains(HasSubstr("960 ranks")));
}

TEST(Tune, a_padded_group_gives_way_to_replicas_with_the_reason) {
  const Model model = load_model("gpt-oss-120b-hf-fused");
  const TuneRequest request{
      .ranks = 1024, .policy = {.rows = 128, .flat = true}, .memory = 80 * kGiB, .fixed_optimizer = true};
  const TuneResult result = tune(model, request);
  ASSERT_TRUE(result.fits);
  EXPECT_LT(result.best.shard, 1024);
  EXPECT_EQ(result.best.shard * result.best.replicas, 1024);
  EXPECT_EQ(result.best.rows, 128);
  EXPECT_LT(result.best.padding, 0.01);
  ASSERT_FALSE(result.reasons.empty());
  EXPECT_THAT(result.reasons[0], HasSubstr("128 rows x 1,024 ranks leaves 4.5 blocks a rank where 4.256 are needed"));
  EXPECT_THAT(result.reasons[0], HasSubstr("replicate"));
  EXPECT_THAT(tune_text(model, request, result, false), HasSubstr("recommended"));
  const auto json = nlohmann::json::parse(tune_json(model, request, result));
  EXPECT_EQ(json.at("recommended").at("shard").get<int>(), result.best.shard);
  EXPECT_EQ(json.at("front").size(), result.front.size());
}

TEST(Tune, the_front_trades_time_for_memory_and_holds_the_best) {
  const TuneResult result = tune(load_model("llama-3-8b"), {.ranks = 32, .policy = {.rows = 32}});
  ASSERT_TRUE(result.fits);
  ASSERT_FALSE(result.front.empty());
  for (std::size_t i = 0; i < result.front.size(); ++i) {
    EXPECT_LE(result.front[i].memory, result.memory);
    if (i == 0) continue;
    EXPECT_GE(result.front[i].seconds, result.front[i - 1].seconds);
    EXPECT_LT(result.front[i].memory, result.front[i - 1].memory);
  }
  EXPECT_LE(result.best.memory, result.memory);
  EXPECT_LE(result.best.seconds, 1.02 * result.front.front().seconds);
}

TEST(Tune, smaller_states_are_offered_only_where_they_must_and_may_be) {
  const Model model = load_model("llama-3-8b");
  TuneRequest request{.ranks = 4, .memory = 60 * kGiB};
  request.step.tokens = 1024;
  EXPECT_EQ(tune(model, request).best.optimizer, Optimizer::kAdamW);
  request.memory = 30 * kGiB;  // 16 bytes a parameter over 4 ranks are 30 already
  const TuneResult smaller = tune(model, request);
  ASSERT_TRUE(smaller.fits);
  EXPECT_NE(smaller.best.optimizer, Optimizer::kAdamW);
  EXPECT_THAT(smaller.reasons, Contains(HasSubstr("adamw doesn't fit")));
  request.fixed_optimizer = true;
  EXPECT_FALSE(tune(model, request).fits);
}

TEST(Tune, what_fits_nowhere_is_said) {
  const TuneResult result = tune(load_model("llama-3-70b"), {.ranks = 2, .memory = 10 * kGiB});
  EXPECT_FALSE(result.fits);
  ASSERT_GE(result.reasons.size(), 2u);
  EXPECT_THAT(result.reasons[0], HasSubstr("nothing fits"));
  EXPECT_THAT(result.reasons, Contains(HasSubstr("twice as many ranks")));
}

TEST(Tune, one_rank_and_odd_numbers_of_ranks_will_do) {
  EXPECT_TRUE(tune(load_model("smollm-135m"), {.ranks = 1}).fits);
  EXPECT_TRUE(tune(load_model("smollm-135m"), {.ranks = 7}).fits);
  EXPECT_INVALID(tune(load_model("smollm-135m"), {.ranks = 0}), "--ranks");
  EXPECT_INVALID(tune(load_model("smollm-135m"), {.ranks = 1 << 20}), "--ranks");
}

}  // namespace
}  // namespace ragged::sim
