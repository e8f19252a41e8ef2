#include "ragged/train/schedule.h"

#include <gtest/gtest.h>

namespace ragged::train {
namespace {

TEST(Schedule, warms_up_linearly_and_falls_along_a_cosine) {
  const ScheduleOptions options{.peak = 2.0, .min_ratio = 0.1, .warmup = 4, .steps = 8};
  // Computed by hand: 2 * s / 4, then 2 * (0.1 + 0.9 * (1 + cos(pi * k / 4)) / 2) for k = 1 .. 4.
  const double expected[] = {0.5, 1.0, 1.5, 2.0, 1.7363961030678928, 1.1, 0.4636038969321073, 0.2};
  for (Index step = 0; step < 8; ++step) {
    EXPECT_NEAR(learning_rate(options, step), expected[step], 1e-14) << "step " << step;
  }
}

TEST(Schedule, stays_at_the_last_rate_after_the_last_step) {
  const ScheduleOptions options{.peak = 1.0, .min_ratio = 0.25, .warmup = 2, .steps = 10};
  EXPECT_NEAR(learning_rate(options, 9), 0.25, 1e-15);
  EXPECT_EQ(learning_rate(options, 9), learning_rate(options, 1000));
}

TEST(Schedule, without_warm_up_starts_falling_at_once) {
  const ScheduleOptions options{.peak = 1.0, .min_ratio = 0.0, .warmup = 0, .steps = 2};
  EXPECT_NEAR(learning_rate(options, 0), 0.5, 1e-15);
  EXPECT_NEAR(learning_rate(options, 1), 0.0, 1e-15);
}

TEST(Schedule, warm_up_may_take_all_steps) {
  const ScheduleOptions options{.peak = 1.0, .min_ratio = 0.1, .warmup = 3, .steps = 3};
  EXPECT_EQ(learning_rate(options, 2), 1.0);
  EXPECT_NEAR(learning_rate(options, 3), 0.1, 1e-15);
}

TEST(Schedule, ratio_of_one_keeps_the_peak) {
  const ScheduleOptions options{.peak = 0.5, .min_ratio = 1.0, .warmup = 1, .steps = 7};
  for (Index step = 0; step < 7; ++step) EXPECT_EQ(learning_rate(options, step), 0.5);
}

}  // namespace
}  // namespace ragged::train
