// AdamW over lists of pieces: golden values, torch's own optimizer, and every way through that must give the same bits.
#include "ragged/optim/adamw_step.h"

#include <cmath>
#include <filesystem>
#include <limits>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "ragged/optim/adamw_kernel.h"
#include "tests/optim/trees.h"
#include "tests/support/expect_error.h"

namespace ragged::test {
namespace {

using optim::adamw_step;
using optim::AdamWPiece;
using optim::AdamWRates;

const AdamWRates kRates{.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};

at::Tensor normal(Index numel, std::uint64_t seed, double scale = 1.0) {
  return at::randn({numel}, at::detail::createCPUGenerator(seed), at::TensorOptions()) * scale;
}

struct Subject {
  AdamWPiece piece;
  explicit Subject(const at::Tensor& initial, at::ScalarType moments = at::kFloat) {
    piece.param = initial.clone();
    piece.exp_avg = at::zeros(initial.sizes(), moments);
    piece.exp_avg_sq = at::zeros(initial.sizes(), moments);
  }
  void step(const at::Tensor& grad, int number, const optim::StepScale& scale = {}) {
    piece.grad = grad;
    piece.step = optim::adamw_constants(kRates, number);
    adamw_step({&piece, 1}, scale);
  }
};

void expect_same(const Subject& a, const Subject& b) {
  EXPECT_TRUE(at::equal(a.piece.param, b.piece.param));
  EXPECT_TRUE(at::equal(a.piece.exp_avg, b.piece.exp_avg));
  EXPECT_TRUE(at::equal(a.piece.exp_avg_sq, b.piece.exp_avg_sq));
}

TEST(AdamWStep, gives_the_golden_values_of_three_steps) {
  Subject subject(at::ones({1}));
  const std::vector<double> grads{0.1, -0.2, 0.3};
  const std::vector<double> params{0.989000001000, 0.991644740276, 0.987269022964};
  for (std::size_t i = 0; i < 3; ++i) {
    subject.step(at::full({1}, grads[i]), static_cast<int>(i) + 1);
    EXPECT_NEAR(subject.piece.param.item<double>(), params[i], 1.5e-7);
  }
  EXPECT_NEAR(subject.piece.exp_avg.item<double>(), 0.0201, 1e-8);
  EXPECT_NEAR(subject.piece.exp_avg_sq.item<double>(), 0.00685125, 1e-9);
}

TEST(AdamWStep, follows_torchs_optimizer_for_fifty_steps) {
  constexpr Index kNumel = 4097;
  for (const double size : {1.0, 1e-3}) {
    Subject subject(normal(kNumel, 1, 0.1));
    const at::Tensor theirs = subject.piece.param.clone().requires_grad_(true);
    torch::optim::AdamW adamw(
        {theirs},
        torch::optim::AdamWOptions(kRates.lr)
            .betas({kRates.beta1, kRates.beta2})
            .eps(kRates.eps)
            .weight_decay(kRates.weight_decay));
    for (int step = 1; step <= 50; ++step) {
      const at::Tensor grad = normal(kNumel, static_cast<std::uint64_t>(step) + 10, size);
      theirs.mutable_grad() = grad.clone();
      adamw.step();
      subject.step(grad, step);
      const at::Tensor apart = (subject.piece.param - theirs.detach()).abs();
      ASSERT_LE(apart.max().item<double>(), 1e-6) << "step " << step;
    }
  }
}

TEST(AdamWStep, gives_the_same_bits_with_every_instruction_set) {
  constexpr Index kNumel = 1037;
  for (const bool bf16_grads : {false, true}) {
    for (const bool bf16_moments : {false, true}) {
      std::vector<Subject> subjects;
      std::vector<at::Tensor> images;
      for (const optim::Isa isa : {optim::Isa::kBaseline, optim::Isa::kAvx2, optim::Isa::kAvx512}) {
        if (!optim::has_isa(isa)) continue;
        Subject subject(normal(kNumel, 1), bf16_moments ? at::kBFloat16 : at::kFloat);
        at::Tensor image = at::empty({kNumel}, at::kBFloat16);
        for (int step = 1; step <= 5; ++step) {
          at::Tensor grad = normal(kNumel, static_cast<std::uint64_t>(step) + 1) *
              at::exp(4 * normal(kNumel, static_cast<std::uint64_t>(step) + 50));
          if (bf16_grads) grad = grad.to(at::kBFloat16);
          const optim::AdamWRun run{
              .params = subject.piece.param.mutable_data_ptr<float>(),
              .grads = grad.const_data_ptr(),
              .exp_avg = subject.piece.exp_avg.mutable_data_ptr(),
              .exp_avg_sq = subject.piece.exp_avg_sq.mutable_data_ptr(),
              .image = reinterpret_cast<std::uint16_t*>(image.mutable_data_ptr<at::BFloat16>()),
              .grads_are_bf16 = bf16_grads,
              .moments_are_bf16 = bf16_moments};
          // Cut at odd places too.
          optim::adamw_step(optim::adamw_constants(kRates, step), 0.7F, run, 0, 13, isa);
          optim::adamw_step(optim::adamw_constants(kRates, step), 0.7F, run, 13, kNumel, isa);
        }
        EXPECT_TRUE(at::equal(image, subject.piece.param.to(at::kBFloat16)));
        subjects.push_back(std::move(subject));
      }
      for (const Subject& subject : subjects) expect_same(subject, subjects.front());

      // One element at a time, compiled without vectors: this file's own loop.
      Subject scalar(normal(kNumel, 1), bf16_moments ? at::kBFloat16 : at::kFloat);
      for (int step = 1; step <= 5; ++step) {
        at::Tensor grad = normal(kNumel, static_cast<std::uint64_t>(step) + 1) *
            at::exp(4 * normal(kNumel, static_cast<std::uint64_t>(step) + 50));
        if (bf16_grads) grad = grad.to(at::kBFloat16);
        const at::Tensor g = grad.to(at::kFloat);
        const at::Tensor m = scalar.piece.exp_avg.to(at::kFloat);
        const at::Tensor v = scalar.piece.exp_avg_sq.to(at::kFloat);
        const optim::AdamWStep s = optim::adamw_constants(kRates, step);
        for (Index i = 0; i < kNumel; ++i) {
          float& first = m.mutable_data_ptr<float>()[i];
          float& second = v.mutable_data_ptr<float>()[i];
          float& param = scalar.piece.param.mutable_data_ptr<float>()[i];
          const auto next = optim::adamw_moments(s, g.const_data_ptr<float>()[i] * 0.7F, first, second);
          first = next.first;
          second = next.second;
          param = optim::adamw_param(s, param, next.first, std::sqrt(next.second));
        }
        scalar.piece.exp_avg.copy_(m);
        scalar.piece.exp_avg_sq.copy_(v);
      }
      expect_same(scalar, subjects.front());
    }
  }
}

// A shard of several parameters with gaps, two kinds of constants, one that is left out: the same bits as one call
// each.
TEST(AdamWStep, joins_neighbours_without_a_trace) {
  const std::vector<layout::Interval> cuts{{0, 1}, {1, 40001}, {40001, 40001}, {40001, 90000}, {90010, 140000}};
  const auto run = [&](bool together, bool reversed, bool with_images) {
    Subject flat(normal(140000, 1));
    at::Tensor images = at::zeros({140000}, at::kBFloat16);
    const at::Tensor grads = normal(140000, 2);
    std::vector<AdamWPiece> pieces;
    for (std::size_t i = 0; i < cuts.size(); ++i) {
      const auto part = [&](const at::Tensor& t) { return t.narrow(0, cuts[i].begin, cuts[i].size()); };
      pieces.push_back(
          {.param = part(flat.piece.param),
           .grad = part(grads),
           .exp_avg = part(flat.piece.exp_avg),
           .exp_avg_sq = part(flat.piece.exp_avg_sq),
           .image = with_images ? part(images) : at::Tensor(),
           .step = optim::adamw_constants(kRates, i == 3 ? 7 : 1)});
    }
    if (reversed) std::reverse(pieces.begin(), pieces.end());
    if (together) {
      adamw_step(pieces, {.grad = 0.5});
    } else {
      for (const AdamWPiece& piece : pieces) adamw_step({&piece, 1}, {.grad = 0.5});
    }
    if (with_images) {
      EXPECT_TRUE(at::equal(images.narrow(0, 0, 90000), flat.piece.param.narrow(0, 0, 90000).to(at::kBFloat16)));
      EXPECT_EQ(images.narrow(0, 90000, 10).count_nonzero().item<Index>(), 0);  // the gap
    }
    return flat;
  };
  const Subject expected = run(false, false, false);
  EXPECT_TRUE(at::equal(expected.piece.param.narrow(0, 90000, 10), normal(140000, 1).narrow(0, 90000, 10)));
  for (const int threads : {1, 3}) {
    at::set_num_threads(threads);
    for (const bool reversed : {false, true}) {
      for (const bool images : {false, true}) expect_same(run(true, reversed, images), expected);
    }
  }
  at::set_num_threads(1);
}

// Threads of this process. A pool that is asked for more than ever before starts some.
std::size_t threads_now() {
  std::size_t count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) count += task.exists() ? 1 : 0;
  return count;
}

TEST(AdamWStep, runs_on_torchs_threads) {
  Subject subject(normal(1 << 20, 1));
  const at::Tensor grad = normal(1 << 20, 2);
  at::set_num_threads(5);
  const std::size_t before = threads_now();
  subject.step(grad, 1);
  EXPECT_GT(threads_now(), before);
  at::set_num_threads(1);
}

TEST(AdamWStep, folds_the_scale_in_and_skips) {
  Subject scaled(normal(1000, 1));
  Subject expected(normal(1000, 1));
  const at::Tensor grad = normal(1000, 2);
  const at::Tensor untouched = grad.clone();
  scaled.step(grad, 1, {.grad = 0.37});
  expected.step(grad * 0.37F, 1);
  expect_same(scaled, expected);
  EXPECT_TRUE(at::equal(grad, untouched));
  scaled.step(at::full({1000}, std::nan("")), 2, {.skip = true});
  expect_same(scaled, expected);
}

TEST(AdamWStep, takes_other_dtypes_the_slow_way) {
  Subject kernel(normal(1000, 1));
  Subject aten(normal(1000, 1));
  Subject wide(normal(1000, 1).to(at::kDouble), at::kDouble);
  Subject half(normal(1000, 1).to(at::kBFloat16));
  for (int step = 1; step <= 5; ++step) {
    const at::Tensor grad = normal(1000, static_cast<std::uint64_t>(step) + 1);
    kernel.step(grad, step);
    aten.step(grad.to(at::kDouble), step);  // no kernel takes such a gradient
    wide.step(grad.to(at::kDouble), step);
    half.step(grad, step);
  }
  EXPECT_TRUE(at::allclose(aten.piece.param, kernel.piece.param, 1e-6, 1e-7));
  EXPECT_TRUE(at::equal(aten.piece.exp_avg, kernel.piece.exp_avg));
  EXPECT_TRUE(at::equal(aten.piece.exp_avg_sq, kernel.piece.exp_avg_sq));
  EXPECT_TRUE(at::allclose(wide.piece.param, kernel.piece.param.to(at::kDouble), 1e-5, 1e-6));
  EXPECT_TRUE(at::allclose(half.piece.param.to(at::kFloat), kernel.piece.param, 2e-2, 2e-2));
  EXPECT_EQ(half.piece.param.scalar_type(), at::kBFloat16);
}

TEST(AdamWStep, survives_tiny_and_huge_gradients) {
  for (const double size : {1e-30, 1e30, 3e38, 1e-45}) {
    Subject subject(normal(100, 1));
    const at::Tensor before = subject.piece.param.clone();
    for (int step = 1; step <= 5; ++step) subject.step(normal(100, 7).clamp(-1, 1) * size, step);
    EXPECT_LT((subject.piece.param - before).abs().max().item<float>(), 0.1F) << size;
    EXPECT_TRUE(at::isfinite(subject.piece.exp_avg_sq).all().item<bool>());
    EXPECT_TRUE(at::isfinite(subject.piece.exp_avg).all().item<bool>());
  }
}

TEST(AdamWStep, passes_on_what_is_not_finite) {
  for (const float bad :
       {std::nanf(""), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    Subject subject(normal(40, 1));
    at::Tensor grad = normal(40, 2);
    grad[17] = bad;
    subject.step(grad, 1);
    for (Index i = 0; i < 40; ++i) EXPECT_EQ(std::isnan(subject.piece.param[i].item<float>()), i == 17);
  }
}

TEST(AdamWStep, only_shrinks_parameters_with_zero_gradients) {
  Subject fresh(normal(200, 1));
  for (int step = 1; step <= 20; ++step) {
    const at::Tensor last = fresh.piece.param.abs();
    fresh.step(at::zeros({200}), step);
    EXPECT_TRUE((fresh.piece.param.abs() <= last).all().item<bool>());
  }
  Subject subject(normal(200, 1));
  for (int step = 1; step <= 5; ++step) subject.step(normal(200, 3), step);
  for (int step = 6; step <= 1000; ++step) {
    const at::Tensor first = subject.piece.exp_avg.abs();
    const at::Tensor second = subject.piece.exp_avg_sq.clone();
    subject.step(at::zeros({200}), step);
    ASSERT_TRUE((subject.piece.exp_avg.abs() <= first).all().item<bool>());
    ASSERT_TRUE((subject.piece.exp_avg_sq <= second).all().item<bool>());
  }
  EXPECT_LT(subject.piece.exp_avg.abs().max().item<float>(), 1e-37F);
}

TEST(AdamWStep, refuses_tensors_that_do_not_fit) {
  Subject subject(normal(10, 1));
  EXPECT_INVALID(subject.step(normal(9, 1), 1), "[adamw] Expected gradient, moments and image to be contiguous");
  EXPECT_INVALID(subject.step(normal(20, 1).slice(0, 0, 20, 2), 1), "of the parameter's 10 elements");
  EXPECT_INVALID(subject.step(at::Tensor(), 1), "[adamw] Expected gradient");
  subject.piece.image = at::zeros({10});
  EXPECT_INVALID(subject.step(normal(10, 1), 1), "[adamw] Expected an image in bf16, but got Float.");
  subject.piece.image = at::Tensor();
  subject.piece.exp_avg = at::zeros({10}, at::kBFloat16);
  EXPECT_INVALID(
      subject.step(normal(10, 1), 1), "[adamw] Expected both moments in one dtype, but got BFloat16 and Float.");
}

}  // namespace
}  // namespace ragged::test
