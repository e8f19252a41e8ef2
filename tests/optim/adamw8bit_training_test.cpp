// 8-bit against fp32 states on a small transformer: how far the parameters are apart, which the loss wouldn't show.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ragged/optim/adamw.h"
#include "ragged/optim/adamw8bit.h"
#include "tests/optim/training.h"

namespace ragged::test {
namespace {

constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.95;

double distance(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).norm() / b.norm()).item<double>();
}

TEST(AdamW8bitTraining, stays_close_to_fp32_states) {
  run_ranks(
      1,
      [&](comm::World& world) {
        const TextTraining training{.kept_steps = {10, 100}};
        const TextRun plain = train_on_text(world, training, [](std::shared_ptr<fsdp::Unit> root) {
          return std::make_unique<optim::AdamW>(
              root, optim::AdamWOptions{.beta1 = kBeta1, .beta2 = kBeta2, .weight_decay = 0.1});
        });
        EXPECT_LT(plain.losses.back(), plain.losses.front() - 0.2);  // it learns
        for (const std::string format : {"power", "dynamic"}) {
          for (const bool embeddings : {false, true}) {
            const TextRun run = train_on_text(world, training, [&](std::shared_ptr<fsdp::Unit> root) {
              optim::AdamW8bitOptions options{.beta1 = kBeta1, .beta2 = kBeta2, .weight_decay = 0.1};
              options.state_format = format;
              options.policy = [&](const buffer::ShardedTensor& param) {
                optim::ParamSettings settings;
                if (embeddings && (param.name == "embed" || param.name == "head")) settings.state_format = format;
                return settings;
              };
              return std::make_unique<optim::AdamW8bit>(root, options);
            });
            const double at10 = distance(run.params[0], plain.params[0]);
            const double at100 = distance(run.params[1], plain.params[1]);
            const std::string what = format + (embeddings ? ", embeddings too" : "");
            RecordProperty(what, std::to_string(at10) + " " + std::to_string(at100));
            EXPECT_GT(at10, 0.0) << what;  // or it wasn't quantised
            EXPECT_LT(at10, 1e-3) << what;
            EXPECT_LT(at100, 3e-2) << what;
            EXPECT_NEAR(run.losses.back(), plain.losses.back(), 0.06) << what;
          }
        }
      },
      quick(60));
}

}  // namespace
}  // namespace ragged::test
