// 8-bit AdamW over lists of pieces: golden values, bits against the slow twin, and values that hurt.
#include "ragged/optim/adamw8bit_step.h"

#include <cmath>
#include <filesystem>
#include <limits>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "ragged/optim/adamw_step.h"
#include "tests/optim/adamw8bit_twin.h"
#include "tests/optim/trees.h"
#include "tests/support/expect_error.h"

namespace ragged::test {
namespace {

using optim::adamw8bit_step;
using optim::AdamW8bitPiece;
using optim::TileFormat;
using optim::TileGeometry;
using optim::TileOptions;

const TwinOptions kTwin{.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};

optim::AdamWStep constants(int step) {
  return optim::adamw_constants(
      {.lr = kTwin.lr,
       .beta1 = kTwin.beta1,
       .beta2 = kTwin.beta2,
       .eps = kTwin.eps,
       .weight_decay = kTwin.weight_decay},
      step);
}

at::Tensor normal(Index numel, std::uint64_t seed, double scale = 1.0) {
  return at::randn({numel}, at::detail::createCPUGenerator(seed), at::TensorOptions()) * scale;
}

// Spread over many orders of magnitude, with zeros.
at::Tensor wild(Index numel, std::uint64_t seed) {
  const at::Tensor values = normal(numel, seed) * at::exp(3 * normal(numel, seed + 1000));
  return at::where(normal(numel, seed + 2000) > 1.5, at::zeros({}), values);
}

// A whole parameter and its states.
struct Subject {
  std::vector<Index> shape;
  TileOptions options;
  AdamW8bitPiece piece;

  Subject(std::vector<Index> global_shape, const at::Tensor& initial, TileOptions tile_options)
      : shape(std::move(global_shape)), options(tile_options) {
    const TileGeometry g = optim::tile_geometry(shape, {0, initial.numel()}, "w");
    const auto codes = [&](bool is_signed) {
      return at::full({g.numel}, static_cast<int>(optim::zero_code(options.format, is_signed)), at::kByte);
    };
    piece = {
        .param = initial.clone(),
        .grad = {},
        .exp_avg_codes = codes(true),
        .exp_avg_scales = at::zeros({g.num_tiles()}),
        .exp_avg_sq_codes = codes(false),
        .exp_avg_sq_scales = at::zeros({g.num_tiles()}),
        .geometry = g,
        .step = {}};
  }
  std::int64_t step(const at::Tensor& grad, int number, const optim::StepScale& scale = {}) {
    piece.grad = grad;
    piece.step = constants(number);
    return adamw8bit_step({&piece, 1}, scale, options);
  }
  at::Tensor first() const {
    return optim::decode_tiles(piece.exp_avg_codes, piece.exp_avg_scales, piece.geometry, options.format, true);
  }
  at::Tensor second() const {
    return optim::decode_tiles(piece.exp_avg_sq_codes, piece.exp_avg_sq_scales, piece.geometry, options.format, false);
  }
};

std::vector<std::uint8_t> bytes_of(const at::Tensor& codes) {
  return {codes.const_data_ptr<std::uint8_t>(), codes.const_data_ptr<std::uint8_t>() + codes.numel()};
}

// NaN is equal to NaN.
void expect_same_bits(const at::Tensor& a, const at::Tensor& b) {
  EXPECT_TRUE(at::equal(a.view(at::kInt), b.view(at::kInt)));
}

void expect_same(const Subject& a, const Subject& b) {
  expect_same_bits(a.piece.param, b.piece.param);
  EXPECT_TRUE(at::equal(a.piece.exp_avg_codes, b.piece.exp_avg_codes));
  EXPECT_TRUE(at::equal(a.piece.exp_avg_sq_codes, b.piece.exp_avg_sq_codes));
  expect_same_bits(a.piece.exp_avg_scales, b.piece.exp_avg_scales);
  expect_same_bits(a.piece.exp_avg_sq_scales, b.piece.exp_avg_sq_scales);
}

void expect_twin(const Subject& subject, const TwinTiled& twin) {
  const std::vector<float> value = values_of(subject.piece.param);
  for (std::size_t i = 0; i < value.size(); ++i) {
    ASSERT_TRUE(value[i] == twin.value[i] || (std::isnan(value[i]) && std::isnan(twin.value[i]))) << i;
  }
  ASSERT_EQ(bytes_of(subject.piece.exp_avg_codes), twin.first_codes);
  ASSERT_EQ(bytes_of(subject.piece.exp_avg_sq_codes), twin.second_codes);
  ASSERT_EQ(values_of(subject.piece.exp_avg_scales), twin.first_scales);
  ASSERT_EQ(values_of(subject.piece.exp_avg_sq_scales), twin.second_scales);
}

const std::vector<TileOptions> kAllOptions{
    {TileFormat::kPower, true},
    {TileFormat::kPower, false},
    {TileFormat::kDynamic, true},
    {TileFormat::kDynamic, false}};

TEST(AdamW8bitStep, gives_the_golden_values_of_two_steps) {
  Subject subject({1, 4}, at::tensor({1.0F, -1.0F, 0.5F, 0.25F}), {TileFormat::kDynamic, false});
  subject.step(at::tensor({0.1F, -0.2F, 0.05F, 0.0F}), 1);
  const auto expect = [&](std::vector<float> params, std::vector<std::uint8_t> first, float first_scale,
                          std::vector<std::uint8_t> second, float second_scale) {
    for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(values_of(subject.piece.param)[i], params[i], 6e-9F);
    EXPECT_EQ(bytes_of(subject.piece.exp_avg_codes), first);
    EXPECT_EQ(bytes_of(subject.piece.exp_avg_sq_codes), second);
    EXPECT_FLOAT_EQ(values_of(subject.piece.exp_avg_scales)[0], first_scale);
    EXPECT_FLOAT_EQ(values_of(subject.piece.exp_avg_sq_scales)[0], second_scale);
  };
  expect(
      {0.98900002F, -0.98900002F, 0.48950002F, 0.24975F}, {219, 0, 201, 127}, 0.0200000014F, {148, 255, 100, 0},
      0.00200000009F);
  subject.step(at::tensor({-0.3F, 0.01F, 0.02F, 0.0004F}), 2);
  expect(
      {0.99289966F, -0.98165768F, 0.4800151F, 0.24215092F}, {0, 13, 205, 144}, 0.0209859386F, {255, 167, 75, 3},
      0.00497722672F);
}

TEST(AdamW8bitStep, equals_the_slow_twin_bit_for_bit) {
  const std::vector<std::vector<Index>> shapes{{1, 1},   {1, 97},     {31, 33},  {32, 32},     {33, 64},
                                               {40, 70}, {3, 40, 31}, {97, 300}, {2, 2, 5, 40}};
  for (const TileOptions& options : kAllOptions) {
    for (const auto& shape : shapes) {
      const at::Tensor initial = normal(checked_product(shape), 1);
      Subject subject(shape, initial, options);
      TwinTiled twin(shape, values_of(initial), {options.format == TileFormat::kDynamic, options.guards});
      for (int step = 1; step <= 5; ++step) {
        const at::Tensor grad = wild(initial.numel(), static_cast<std::uint64_t>(step));
        EXPECT_EQ(subject.step(grad, step), 0);
        twin.update(kTwin, values_of(grad));
        expect_twin(subject, twin);
        if (HasFatalFailure()) FAIL() << "step " << step << ", shape of " << shape[shape.size() - 2] << " rows";
      }
    }
  }
}

TEST(AdamW8bitStep, gives_the_same_bits_with_every_instruction_set) {
  for (const TileOptions& options : kAllOptions) {
    for (const int columns : {32, 64, 61}) {
      Subject expected({32, columns}, normal(32 * columns, 1), options);
      const Index numel = expected.piece.geometry.numel;
      for (const bool bf16 : {false, true}) {
        for (const optim::Isa isa : {optim::Isa::kBaseline, optim::Isa::kAvx2, optim::Isa::kAvx512}) {
          if (!optim::has_isa(isa)) continue;
          Subject subject({32, columns}, normal(32 * columns, 1), options);
          TwinTiled twin(
              subject.shape, values_of(subject.piece.param), {options.format == TileFormat::kDynamic, options.guards});
          for (int step = 1; step <= 3; ++step) {
            at::Tensor grad = wild(numel, static_cast<std::uint64_t>(step));
            if (bf16) grad = grad.to(at::kBFloat16);
            at::Tensor image = at::empty({numel}, at::kBFloat16);
            const optim::TilePanel panel{
                .params = subject.piece.param.mutable_data_ptr<float>(),
                .grads = grad.const_data_ptr(),
                .image = reinterpret_cast<std::uint16_t*>(image.mutable_data_ptr<at::BFloat16>()),
                .first_codes = subject.piece.exp_avg_codes.mutable_data_ptr<std::uint8_t>(),
                .second_codes = subject.piece.exp_avg_sq_codes.mutable_data_ptr<std::uint8_t>(),
                .first_scales = subject.piece.exp_avg_scales.mutable_data_ptr<float>(),
                .second_scales = subject.piece.exp_avg_sq_scales.mutable_data_ptr<float>(),
                .stride = columns,
                .rows = 32,
                .columns = columns,
                .grads_are_bf16 = bf16};
            adamw8bit_step(constants(step), 0.5F, panel, options, isa);
            twin.update(kTwin, values_of(grad.to(at::kFloat) * 0.5F));
            expect_twin(subject, twin);
            EXPECT_TRUE(at::equal(image, subject.piece.param.to(at::kBFloat16)));
            if (HasFatalFailure()) FAIL() << to_string(isa) << ", " << columns << " columns";
          }
        }
      }
    }
  }
}

// Many pieces at once, in one thread or three, with and without others in the list.
TEST(AdamW8bitStep, does_not_depend_on_threads_or_on_what_else_is_in_the_list) {
  const std::vector<std::vector<Index>> shapes{{33, 500}, {1, 1}, {4, 40, 90}, {257, 257}, {700, 33}};
  for (const TileOptions& options : {kAllOptions[0], kAllOptions[2]}) {
    std::vector<std::vector<Subject>> runs;
    for (const int threads : {0, 1, 3}) {  // 0: one piece a call
      at::set_num_threads(std::max(threads, 1));
      std::vector<Subject> subjects;
      for (const auto& shape : shapes) subjects.emplace_back(shape, normal(checked_product(shape), 1), options);
      for (int step = 1; step <= 3; ++step) {
        std::vector<AdamW8bitPiece> pieces;
        for (Subject& subject : subjects) {
          const at::Tensor grad = wild(subject.piece.geometry.numel, static_cast<std::uint64_t>(step));
          if (threads == 0) {
            subject.step(grad, step);
            continue;
          }
          subject.piece.grad = grad;
          subject.piece.step = constants(step);
          pieces.push_back(subject.piece);
        }
        adamw8bit_step(pieces, {}, options);
      }
      runs.push_back(std::move(subjects));
    }
    at::set_num_threads(1);
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      expect_same(runs[0][i], runs[1][i]);
      expect_same(runs[0][i], runs[2][i]);
    }
  }
}

// Threads of this process. A pool that is asked for more than ever before starts some.
std::size_t threads_now() {
  std::size_t count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) count += task.exists() ? 1 : 0;
  return count;
}

TEST(AdamW8bitStep, runs_on_torchs_threads) {
  Subject subject({1024, 1024}, normal(1 << 20, 1), {});
  const at::Tensor grad = normal(1 << 20, 2);
  at::set_num_threads(5);
  const std::size_t before = threads_now();
  subject.step(grad, 1);
  EXPECT_GT(threads_now(), before);
  at::set_num_threads(1);
}

// Cut at any strip, each part by itself: the same tiles.
TEST(AdamW8bitStep, may_be_cut_between_strips) {
  const std::vector<Index> shape{3, 40, 37};
  const TileOptions options{};
  Subject whole(shape, normal(3 * 40 * 37, 1), options);
  const at::Tensor grad = wild(whole.piece.geometry.numel, 5);
  for (const Index cut_row : {32, 40, 72, 80, 112}) {
    Subject parts(shape, normal(3 * 40 * 37, 1), options);
    Subject expected(shape, normal(3 * 40 * 37, 1), options);
    for (int step = 1; step <= 2; ++step) {
      expected.step(grad * step, step);
      Index tile = 0;
      for (const layout::Interval owned : {layout::Interval{0, cut_row * 37}, layout::Interval{cut_row * 37, 4440}}) {
        const auto part = [&](const at::Tensor& t) { return t.narrow(0, owned.begin, owned.size()); };
        AdamW8bitPiece piece = parts.piece;
        piece.geometry = optim::tile_geometry(shape, owned, "w");
        piece.param = part(piece.param);
        piece.grad = part(grad * step);
        piece.exp_avg_codes = part(piece.exp_avg_codes);
        piece.exp_avg_sq_codes = part(piece.exp_avg_sq_codes);
        piece.exp_avg_scales = piece.exp_avg_scales.narrow(0, tile, piece.geometry.num_tiles());
        piece.exp_avg_sq_scales = piece.exp_avg_sq_scales.narrow(0, tile, piece.geometry.num_tiles());
        piece.step = constants(step);
        tile += piece.geometry.num_tiles();
        adamw8bit_step({&piece, 1}, {}, options);
      }
    }
    expect_same(parts, expected);
  }
}

TEST(AdamW8bitStep, agrees_with_itself_through_aten) {
  for (const TileOptions& options : kAllOptions) {
    for (const std::vector<Index>& shape : {std::vector<Index>{33, 40}, std::vector<Index>{3, 40, 70}}) {
      const at::Tensor initial = normal(checked_product(shape), 1);
      Subject kernel(shape, initial, options);
      for (int step = 1; step <= 4; ++step) {
        at::Tensor grad = normal(initial.numel(), static_cast<std::uint64_t>(step));
        if (step == 3) grad[5] = std::numeric_limits<float>::infinity();
        // Both from the same states: a code that rounds otherwise must not be carried along.
        Subject aten = kernel;
        for (at::Tensor* t :
             {&aten.piece.param, &aten.piece.exp_avg_codes, &aten.piece.exp_avg_scales, &aten.piece.exp_avg_sq_codes,
              &aten.piece.exp_avg_sq_scales}) {
          *t = t->clone();
        }
        EXPECT_EQ(kernel.step(grad, step), aten.step(grad.to(at::kDouble), step));  // no kernel for such a gradient
        EXPECT_TRUE(at::allclose(kernel.piece.param, aten.piece.param, 1e-6, 1e-7, /*equal_nan=*/true));
        const auto apart = [](const at::Tensor& a, const at::Tensor& b) {
          return (a.to(at::kInt) - b.to(at::kInt)).remainder(256).ne(0).sum().item<Index>();
        };
        EXPECT_LE(apart(kernel.piece.exp_avg_codes, aten.piece.exp_avg_codes), 3);
        EXPECT_LE(apart(kernel.piece.exp_avg_sq_codes, aten.piece.exp_avg_sq_codes), 3);
        expect_same_bits(kernel.piece.exp_avg_scales, aten.piece.exp_avg_scales);
        expect_same_bits(kernel.piece.exp_avg_sq_scales, aten.piece.exp_avg_sq_scales);
      }
    }
  }
}

TEST(AdamW8bitStep, folds_the_scale_in_and_skips) {
  for (const TileOptions& options : kAllOptions) {
    Subject scaled({40, 50}, normal(2000, 1), options);
    Subject expected({40, 50}, normal(2000, 1), options);
    const at::Tensor grad = wild(2000, 3);
    const at::Tensor untouched = grad.clone();
    scaled.step(grad, 1, {.grad = 0.37});
    expected.step(grad * 0.37F, 1);
    expect_same(scaled, expected);
    EXPECT_TRUE(at::equal(grad, untouched));
    EXPECT_EQ(scaled.step(at::full({2000}, std::nan("")), 2, {.skip = true}), 0);
    expect_same(scaled, expected);
  }
}

TEST(AdamW8bitStep, counts_gradients_that_are_not_finite_and_keeps_their_moments) {
  for (const TileOptions& options : kAllOptions) {
    Subject subject({33, 40}, normal(1320, 1), options);
    TwinTiled twin(
        subject.shape, values_of(subject.piece.param), {options.format == TileFormat::kDynamic, options.guards});
    for (int step = 1; step <= 3; ++step) {
      at::Tensor grad = normal(1320, static_cast<std::uint64_t>(step));
      if (step == 2) {
        grad[3] = std::numeric_limits<float>::infinity();
        grad[40] = -std::numeric_limits<float>::infinity();
        grad[1319] = std::nan("");
      }
      EXPECT_EQ(subject.step(grad, step), step == 2 ? 3 : 0);
      twin.update(kTwin, values_of(grad));
      expect_twin(subject, twin);
    }
    const std::vector<float> params = values_of(subject.piece.param);
    for (std::size_t i = 0; i < params.size(); ++i) {
      EXPECT_EQ(std::isnan(params[i]), i == 3 || i == 40 || i == 1319) << i;
    }
    EXPECT_TRUE(at::isfinite(subject.first()).all().item<bool>());
    EXPECT_TRUE(at::isfinite(subject.second()).all().item<bool>());
  }
}

TEST(AdamW8bitStep, survives_tiny_and_huge_gradients) {
  for (const TileOptions& options : kAllOptions) {
    for (const double size : {1e-30, 1e30, 3e38, 1e-45}) {
      Subject subject({32, 32}, normal(1024, 1), options);
      const at::Tensor before = subject.piece.param.clone();
      for (int step = 1; step <= 5; ++step) {
        EXPECT_EQ(subject.step(normal(1024, 7).clamp(-1, 1) * size, step), 0);
      }
      // Five steps of at most some lr each.
      EXPECT_LT((subject.piece.param - before).abs().max().item<float>(), 0.1F) << size;
      EXPECT_TRUE(at::isfinite(subject.first()).all().item<bool>());
      EXPECT_TRUE(at::isfinite(subject.second()).all().item<bool>());
      // And on with ordinary ones: still no more than the steps allow.
      for (int step = 6; step <= 10; ++step) subject.step(normal(1024, 8), step);
      EXPECT_LT((subject.piece.param - before).abs().max().item<float>(), 0.4F) << size;
    }
  }
}

// One huge element must not blow up small neighbours whose gradient then stops (the second moment would be 0, the step
// lr * m / eps).
TEST(AdamW8bitStep, guards_against_a_second_moment_that_is_lost) {
  for (const TileFormat format : {TileFormat::kPower, TileFormat::kDynamic}) {
    for (const bool guards : {true, false}) {
      Subject subject({32, 32}, at::zeros({1024}), {format, guards});
      at::Tensor grad = at::full({1024}, format == TileFormat::kPower ? 1e-6 : 1e-4);
      grad[0] = 1.0;
      subject.step(grad, 1);
      grad.fill_(0);
      for (int step = 2; step <= 6; ++step) subject.step(grad, step);
      const float largest = subject.piece.param.narrow(0, 1, 1023).abs().max().item<float>();
      if (guards) {
        EXPECT_LT(largest, 0.1F);
      } else if (format == TileFormat::kDynamic) {
        EXPECT_GT(largest, 1.0F);  // so the case is one
      }
    }
  }
}

TEST(AdamW8bitStep, decays_to_nothing_with_zero_gradients_for_ever) {
  for (const TileOptions& options : kAllOptions) {
    if (!options.guards) continue;
    // From the start: parameters only shrink.
    Subject fresh({33, 40}, normal(1320, 1), options);
    at::Tensor last = fresh.piece.param.abs();
    for (int step = 1; step <= 20; ++step) {
      fresh.step(at::zeros({1320}), step);
      EXPECT_TRUE((fresh.piece.param.abs() <= last).all().item<bool>());
      last = fresh.piece.param.abs();
    }
    // After a history: moments only shrink, down to exactly 0; from then on parameters do too.
    Subject subject({33, 40}, normal(1320, 1), options);
    int step = 0;
    while (step < 5) subject.step(wild(1320, 9), ++step);
    at::Tensor first = subject.first().abs();
    at::Tensor second = subject.second();
    while (step < 3000) {
      subject.step(at::zeros({1320}), ++step);
      const at::Tensor next_first = subject.first().abs();
      const at::Tensor next_second = subject.second();
      ASSERT_TRUE((next_first <= first).all().item<bool>()) << step;
      // Below the normal numbers rounding may go either way.
      const at::Tensor shrinks = (next_second <= second).logical_or(next_second < std::numeric_limits<float>::min());
      ASSERT_TRUE(shrinks.all().item<bool>()) << step;
      first = next_first;
      second = next_second;
    }
    EXPECT_EQ(first.max().item<float>(), 0.0F);
    EXPECT_EQ(second.max().item<float>(), 0.0F);
    last = subject.piece.param.abs();
    subject.step(at::zeros({1320}), ++step);
    EXPECT_TRUE((subject.piece.param.abs() <= last).all().item<bool>());
  }
}

TEST(AdamW8bitStep, refuses_tensors_that_do_not_fit) {
  Subject subject({33, 40}, normal(1320, 1), {});
  EXPECT_INVALID(subject.step(normal(1319, 1), 1), "[adamw8bit] Expected a contiguous parameter, gradient and image");
  EXPECT_INVALID(subject.step(normal(2640, 1).slice(0, 0, 2640, 2), 1), "of the 1320 elements");
  const at::Tensor scales = subject.piece.exp_avg_scales;
  subject.piece.exp_avg_scales = at::zeros({3});
  EXPECT_INVALID(subject.step(normal(1320, 1), 1), "[adamw8bit] Expected 4 contiguous scales in fp32");
  subject.piece.exp_avg_scales = scales;
  subject.piece.exp_avg_codes = at::zeros({1320}, at::kChar);
  EXPECT_INVALID(subject.step(normal(1320, 1), 1), "[adamw8bit] Expected 1320 contiguous codes in uint8");
}

}  // namespace
}  // namespace ragged::test
