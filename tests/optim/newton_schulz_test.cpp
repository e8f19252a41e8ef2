#include "ragged/optim/newton_schulz.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ragged/base/error.h"

namespace ragged::optim {
namespace {

const NewtonSchulzOptions kFp64{.dtype = at::kDouble};

at::Tensor golden_input() {
  return at::tensor({1.0, 2.0, 3.0, 4.0, 5.0, 6.5}, at::kDouble).view({2, 3});
}

void expect_golden(std::string_view set, std::vector<double> expected) {
  const at::Tensor result = newton_schulz(golden_input(), newton_schulz_set(set, 5), kFp64).view({-1});
  for (int i = 0; i < 6; ++i) {
    EXPECT_NEAR(result[i].item<double>(), expected[static_cast<std::size_t>(i)], 2e-6) << set << " " << i;
  }
}

// Computed in double precision, apart from this code, with 1e-7 added to the norm.
TEST(NewtonSchulz, golden_vectors) {
  expect_golden("keller", {-0.79162501, 0.11016395, 0.72971725, 0.63315021, 0.36808427, 0.25272102});
  expect_golden("you", {-0.63730700, 0.17285037, 0.74176368, 0.69856519, 0.51134040, 0.47174727});
  expect_golden("polar_express", {-0.56560972, 0.17632871, 0.70034246, 0.67141295, 0.51237915, 0.49175314});
}

TEST(NewtonSchulz, ends_at_the_polar_factor_with_ten_steps_that_settle) {
  const at::Tensor result = newton_schulz(golden_input(), newton_schulz_set("deepseek_v4"), kFp64);
  const at::Tensor exact =
      at::tensor({-0.63926170, 0.17587260, 0.74860758, 0.70629946, 0.51927532, 0.48113845}, at::kDouble);
  EXPECT_LT((result.view({-1}) - exact).abs().max().item<double>(), 5e-3);
}

TEST(NewtonSchulz, the_size_of_the_input_does_not_matter) {
  const at::Tensor x = at::randn({7, 5}, at::kFloat);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const NewtonSchulzOptions options{.dtype = dtype};
    const auto set = newton_schulz_set("keller");
    const at::Tensor plain = newton_schulz(x, set, options);
    EXPECT_TRUE(at::equal(plain, newton_schulz(at::ldexp(x, at::scalar_tensor(100)), set, options)));
    EXPECT_TRUE(at::equal(plain, newton_schulz(at::ldexp(x, at::scalar_tensor(-100)), set, options)));
    EXPECT_TRUE(at::isfinite(newton_schulz(x * 1e30, set, options)).all().item<bool>());
    EXPECT_TRUE(at::isfinite(newton_schulz(x * 1e-30, set, options)).all().item<bool>());
  }
}

TEST(NewtonSchulz, zeros_give_zeros_and_what_is_not_finite_is_seen) {
  const auto set = newton_schulz_set("keller");
  EXPECT_TRUE(at::equal(newton_schulz(at::zeros({3, 4}), set, {.dtype = at::kFloat}), at::zeros({3, 4})));
  for (const double bad : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    at::Tensor x = at::ones({3, 4});
    x[1][2] = bad;
    EXPECT_TRUE(at::isnan(newton_schulz(x, set, {.dtype = at::kFloat})).any().item<bool>());
  }
}

TEST(NewtonSchulz, tall_is_wide_transposed_and_a_stack_is_a_loop) {
  const at::Tensor x = at::randn({3, 9, 4});
  const auto set = newton_schulz_set("polar_express", 7);
  const NewtonSchulzOptions options{.dtype = at::kFloat};
  const at::Tensor stacked = newton_schulz(x, set, options);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::equal(stacked[i], newton_schulz(x[i], set, options)));
    EXPECT_TRUE(at::equal(stacked[i].t(), newton_schulz(x[i].t().contiguous(), set, options)));
  }
}

// By the processor's instructions, where it has them, and through fp32. Singular values as the band of the set in 16
// bits has them.
TEST(NewtonSchulz, bfloat16_stays_near_double_precision) {
  at::manual_seed(3);
  for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{{24, 40}, {67, 31}, {1, 7}, {64, 64}}) {
    const at::Tensor x = at::randn({rows, cols}, at::kDouble);
    const auto set = newton_schulz_set("keller");
    const at::Tensor exact = newton_schulz(x, set, kFp64);
    for (const bool native : {true, false}) {
      const at::Tensor rough = newton_schulz(x, set, {.dtype = at::kBFloat16, .native_bf16 = native});
      EXPECT_EQ(rough.scalar_type(), at::kBFloat16);
      EXPECT_LT(((rough.to(at::kDouble) - exact).norm() / exact.norm()).item<double>(), 0.06) << native;
      if (rows > 1) {  // it was rounded
        EXPECT_GT((rough.to(at::kDouble) - exact).abs().max().item<double>(), 1e-4) << native;
      }
      const at::Tensor values = std::get<1>(at::linalg_svd(rough.to(at::kDouble), false));
      EXPECT_LT(values.max().item<double>(), 1.21) << native;
    }
  }
}

TEST(NewtonSchulz, bfloat16_zeros_give_zeros_and_nan_is_seen) {
  const auto set = newton_schulz_set("keller");
  for (const bool native : {true, false}) {
    const NewtonSchulzOptions options{.dtype = at::kBFloat16, .native_bf16 = native};
    EXPECT_EQ(newton_schulz(at::zeros({33, 40}), set, options).abs().max().item<float>(), 0.0F);
    at::Tensor x = at::ones({33, 40});
    x[1][2] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(at::isnan(newton_schulz(x, set, options)).any().item<bool>());
  }
}

TEST(NewtonSchulz, takes_coefficients_of_ones_own) {
  const auto own = newton_schulz_set("3.4445, -4.7750,2.0315", 7);
  EXPECT_EQ(own.steps, newton_schulz_set("keller", 7).steps);
  EXPECT_EQ(own.norm_factor, 1.0);
  EXPECT_EQ(newton_schulz_set("1e-3,2, 0.1").steps.size(), 5u);
}

TEST(NewtonSchulz, refuses_what_there_is_not) {
  EXPECT_THROW(newton_schulz_set("jordan"), InvalidArgument);
  for (const char* text : {"1, 2", "1, 2, 3, 4", "1, 2, 3,", "1; 2; 3", "1, 2, x", "1, 2, inf", ", 1, 2", "", " "})
    EXPECT_THROW(newton_schulz_set(text), InvalidArgument) << text;
  EXPECT_THROW(newton_schulz_set("you", 6), InvalidArgument);
  EXPECT_THROW(newton_schulz_set("deepseek_v4", 5), InvalidArgument);
  EXPECT_THROW(check({.dtype = at::kHalf}), InvalidArgument);
}

}  // namespace
}  // namespace ragged::optim
