// The arithmetic of one step: bits against a scalar twin, values against torch's own operators, bf16 rounding.
#include "ragged/optim/adamw_kernel.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include "tests/optim/adamw_twin.h"

namespace ragged::test {
namespace {

using optim::AdamWRun;
using optim::AdamWStep;
using optim::Isa;

// fp32 gradients; moments as their type says.
template <class Moment>
void adamw_step(
    const AdamWStep& step, std::int64_t numel, float* params, const float* grads, Moment* m, Moment* v,
    Isa isa = optim::best_isa()) {
  const AdamWRun run{
      .params = params,
      .grads = grads,
      .exp_avg = m,
      .exp_avg_sq = v,
      .moments_are_bf16 = std::is_same_v<Moment, std::uint16_t>};
  optim::adamw_step(step, 1.0F, run, 0, numel, isa);
}

std::vector<float> normal(std::size_t numel, std::uint64_t seed, double scale = 1.0) {
  const at::Tensor values =
      at::randn({static_cast<Index>(numel)}, at::detail::createCPUGenerator(seed), at::TensorOptions()) * scale;
  return {values.const_data_ptr<float>(), values.const_data_ptr<float>() + numel};
}

AdamWStep constants(const TwinOptions& o, int step, bool decays) {
  return {
      .decay = static_cast<float>(decays ? 1.0 - o.lr * o.weight_decay : 1.0),
      .beta1 = static_cast<float>(o.beta1),
      .one_minus_beta1 = static_cast<float>(1.0 - o.beta1),
      .beta2 = static_cast<float>(o.beta2),
      .one_minus_beta2 = static_cast<float>(1.0 - o.beta2),
      .step_size = static_cast<float>(o.lr / (1.0 - std::pow(o.beta1, step))),
      .root_correction2 = static_cast<float>(std::sqrt(1.0 - std::pow(o.beta2, step))),
      .eps = static_cast<float>(o.eps)};
}

float wide(std::uint16_t bits) {
  return static_cast<float>(at::BFloat16(bits, at::BFloat16::from_bits()));
}

const TwinOptions kOptions{.lr = 1e-2, .beta2 = 0.95, .weight_decay = 0.1};

TEST(AdamWKernel, equals_a_scalar_twin_bit_for_bit) {
  for (const std::size_t numel : {0U, 1U, 3U, 4U, 7U, 8U, 9U, 31U, 32U, 33U, 7919U}) {
    for (const bool decays : {true, false}) {
      TwinParameter twin(normal(numel, 1), decays);
      std::vector<float> params = twin.value;
      std::vector<float> exp_avg(numel, 0.0F);
      std::vector<float> exp_avg_sq(numel, 0.0F);
      for (int step = 1; step <= 5; ++step) {
        const std::vector<float> grads = normal(numel, static_cast<std::uint64_t>(step) + 1, 1e-2);
        twin.update(kOptions, grads);
        adamw_step(
            constants(kOptions, step, decays), static_cast<std::int64_t>(numel), params.data(), grads.data(),
            exp_avg.data(), exp_avg_sq.data());
        ASSERT_EQ(params, twin.value) << numel << " elements, step " << step;
        ASSERT_EQ(exp_avg, twin.exp_avg);
        ASSERT_EQ(exp_avg_sq, twin.exp_avg_sq);
      }
    }
  }
}

// The bits of an element don't depend on where a run starts: vectorised bodies and scalar tails agree.
TEST(AdamWKernel, may_be_cut_anywhere) {
  constexpr std::size_t kNumel = 67;
  const std::vector<float> initial = normal(kNumel, 1);
  const std::vector<float> grads = normal(kNumel, 2);
  std::vector<float> whole = initial;
  std::vector<float> m(kNumel, 0.5F);
  std::vector<float> v(kNumel, 0.25F);
  const AdamWStep step = constants(kOptions, 3, true);
  adamw_step(step, kNumel, whole.data(), grads.data(), m.data(), v.data());
  for (std::size_t cut = 0; cut <= kNumel; ++cut) {
    std::vector<float> parts = initial;
    std::vector<float> m2(kNumel, 0.5F);
    std::vector<float> v2(kNumel, 0.25F);
    adamw_step(step, static_cast<std::int64_t>(cut), parts.data(), grads.data(), m2.data(), v2.data());
    adamw_step(
        step, static_cast<std::int64_t>(kNumel - cut), parts.data() + cut, grads.data() + cut, m2.data() + cut,
        v2.data() + cut);
    ASSERT_EQ(parts, whole) << cut;
    ASSERT_EQ(m2, m);
    ASSERT_EQ(v2, v);
  }
}

// torch.optim.AdamW(foreach=True), operator by operator.
TEST(AdamWKernel, agrees_with_torchs_operators) {
  constexpr std::size_t kNumel = 10007;
  const auto tensor = [](const std::vector<float>& values) { return at::tensor(values); };
  std::vector<float> params = normal(kNumel, 1);
  std::vector<float> m(kNumel, 0.0F);
  std::vector<float> v(kNumel, 0.0F);
  const std::vector<at::Tensor> p{tensor(params)};
  const std::vector<at::Tensor> exp_avg{at::zeros_like(p[0])};
  const std::vector<at::Tensor> exp_avg_sq{at::zeros_like(p[0])};
  for (int step = 1; step <= 20; ++step) {
    const std::vector<float> grads = normal(kNumel, static_cast<std::uint64_t>(step) + 100, 1e-3);
    const std::vector<at::Tensor> g{tensor(grads)};
    at::_foreach_mul_(p, 1.0 - kOptions.lr * kOptions.weight_decay);
    at::_foreach_lerp_(exp_avg, g, 1.0 - kOptions.beta1);
    at::_foreach_mul_(exp_avg_sq, kOptions.beta2);
    at::_foreach_addcmul_(exp_avg_sq, g, g, 1.0 - kOptions.beta2);
    std::vector<at::Tensor> denominator = at::_foreach_sqrt(exp_avg_sq);
    at::_foreach_div_(denominator, std::sqrt(1.0 - std::pow(kOptions.beta2, step)));
    at::_foreach_add_(denominator, kOptions.eps);
    at::_foreach_addcdiv_(p, exp_avg, denominator, -kOptions.lr / (1.0 - std::pow(kOptions.beta1, step)));
    adamw_step(constants(kOptions, step, true), kNumel, params.data(), grads.data(), m.data(), v.data());
    const double difference = (tensor(params) - p[0]).norm().item<double>();
    EXPECT_LE(difference, 1e-6 * p[0].norm().item<double>()) << "step " << step;
    EXPECT_LE((tensor(m) - exp_avg[0]).norm().item<double>(), 1e-6 * exp_avg[0].norm().item<double>());
    EXPECT_LE((tensor(v) - exp_avg_sq[0]).norm().item<double>(), 1e-6 * exp_avg_sq[0].norm().item<double>());
  }
}

// A step that changes nothing writes the parameters' image, so rounding can be seen alone. Moments are rounded by the
// same function.
std::vector<std::uint16_t> stored(std::vector<float> values) {
  std::vector<float> zeros(values.size(), 0.0F);
  std::vector<float> m = zeros;
  std::vector<float> v = zeros;
  std::vector<std::uint16_t> image(values.size(), 0);
  const AdamWRun run{
      .params = values.data(),
      .grads = zeros.data(),
      .exp_avg = m.data(),
      .exp_avg_sq = v.data(),
      .image = image.data()};
  optim::adamw_step(AdamWStep{}, 1.0F, run, 0, static_cast<std::int64_t>(values.size()));
  return image;
}

TEST(AdamWKernel, rounds_to_bfloat16_to_nearest_even) {
  // 1 + 2^-8 lies in the middle of two bf16 numbers, as does 1 + 3 * 2^-8.
  const float middle = 1.0F + std::ldexp(1.0F, -8);
  EXPECT_EQ(stored({middle})[0], 0x3F80);
  EXPECT_EQ(stored({std::nextafter(middle, 2.0F)})[0], 0x3F81);
  EXPECT_EQ(stored({std::nextafter(middle, 0.0F)})[0], 0x3F80);
  EXPECT_EQ(stored({1.0F + 3 * std::ldexp(1.0F, -8)})[0], 0x3F82);
  EXPECT_EQ(stored({-middle})[0], 0xBF80);
  EXPECT_EQ(stored({std::numeric_limits<float>::max()})[0], 0x7F80);  // rounds up to infinity
  EXPECT_EQ(stored({std::numeric_limits<float>::infinity()})[0], 0x7F80);
  EXPECT_EQ(stored({-std::numeric_limits<float>::infinity()})[0], 0xFF80);
  // A NaN stays one, even where adding to its bits would carry into the sign, or leave an infinity.
  for (const std::uint32_t bits : {0x7FC00000U, 0x7F800001U, 0x7FFFFFFFU, 0xFFFFFFFFU, 0xFF800001U}) {
    float nan = 0.0F;
    std::memcpy(&nan, &bits, sizeof(nan));
    EXPECT_TRUE(std::isnan(wide(stored({nan})[0]))) << bits;
  }
}

TEST(AdamWKernel, rounds_like_torch_over_a_sweep_of_all_exponents) {
  std::vector<float> values;
  for (std::uint32_t high = 1; high < 0xFFFF; ++high) {
    for (const std::uint32_t low : {0x0000U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      const std::uint32_t bits = high << 16 | low;
      float value = 0.0F;
      std::memcpy(&value, &bits, sizeof(value));
      if (!std::isnan(value) && value != 0.0F) values.push_back(value);
    }
  }
  const std::vector<std::uint16_t> got = stored(values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(got[i], at::BFloat16(values[i]).x) << values[i];
  }
}

TEST(AdamWKernel, computes_with_the_moments_before_they_are_rounded) {
  constexpr std::size_t kNumel = 1021;
  TwinParameter twin(normal(kNumel, 1), true);
  std::vector<float> params = twin.value;
  std::vector<std::uint16_t> m(kNumel, 0);
  std::vector<std::uint16_t> v(kNumel, 0);
  for (int step = 1; step <= 5; ++step) {
    const std::vector<float> grads = normal(kNumel, static_cast<std::uint64_t>(step) + 1, 1e-2);
    twin.update(kOptions, grads, [](float x) { return static_cast<float>(at::BFloat16(x)); });
    adamw_step(constants(kOptions, step, true), kNumel, params.data(), grads.data(), m.data(), v.data());
    ASSERT_EQ(params, twin.value) << "step " << step;
    for (std::size_t i = 0; i < kNumel; ++i) {
      ASSERT_EQ(wide(m[i]), twin.exp_avg[i]);
      ASSERT_EQ(wide(v[i]), twin.exp_avg_sq[i]);
    }
  }
}

}  // namespace
}  // namespace ragged::test
