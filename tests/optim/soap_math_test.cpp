// SOAP on whole matrices: against its twin from the paper, and where numbers end.
#include "ragged/optim/soap_math.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ragged/optim/adamw_step.h"
#include "tests/optim/soap_twin.h"

namespace ragged::test {
namespace {

using optim::SoapSides;
using optim::SoapState;
using optim::SoapStep;

constexpr double kLr = 0.02;
constexpr double kDecay = 0.1;

struct Matrix {
  at::Tensor param;
  SoapSides sides;
  SoapState state;
  int frequency = 10;
  int steps = 0;

  Matrix(Index rows, Index cols, SoapSides which = {}, int every = 10)
      : param(at::randn({rows, cols})), sides(which), frequency(every) {
    state = optim::make_soap_state(rows, cols, sides, at::TensorOptions());
  }
  SoapStep next() {
    ++steps;
    const bool has_basis = sides.left || sides.right;
    return {
        .adam = optim::adamw_constants(
            {.lr = kLr, .beta1 = 0.95, .beta2 = 0.95, .eps = 1e-8, .weight_decay = kDecay},
            has_basis ? std::max(1, steps - 1) : steps),
        .refreshes_basis = steps > 1 && (steps - 1) % frequency == 0};
  }
  at::Tensor step(const at::Tensor& grad) {
    const SoapStep step = next();
    const at::Tensor update = optim::soap_update(grad, state, step);
    param = param * step.adam.decay - update * step.adam.step_size;
    return update;
  }
};

double largest(const at::Tensor& x) {
  return x.abs().max().item<double>();
}
bool is_finite(const at::Tensor& x) {
  return x.isfinite().all().item<bool>();
}
bool is_zero(const at::Tensor& x) {
  return !x.any().item<bool>();
}

TEST(SoapMath, follows_the_twin_for_every_shape_side_and_frequency) {
  at::manual_seed(1);
  const std::vector<std::pair<Index, Index>> shapes{{7, 5}, {5, 7}, {13, 13}, {1, 11}, {11, 1}, {1, 1}, {31, 29}};
  for (const auto& [rows, cols] : shapes) {
    for (const SoapSides sides :
         {SoapSides{}, SoapSides{true, false}, SoapSides{false, true}, SoapSides{false, false}}) {
      for (const int frequency : {1, 3}) {
        SCOPED_TRACE(
            std::to_string(rows) + " x " + std::to_string(cols) + (sides.left ? " left" : "") +
            (sides.right ? " right" : "") + " every " + std::to_string(frequency));
        Matrix ours(rows, cols, sides, frequency);
        SoapTwin twin(ours.param);
        twin.frequency = frequency;
        twin.left = sides.left;
        twin.right = sides.right;
        for (int i = 0; i < 9; ++i) {
          const at::Tensor grad = at::randn({rows, cols}) * 0.3;
          ours.step(grad);
          twin.step(grad, kLr, kDecay, ours.state.left_basis, ours.state.right_basis);
          ASSERT_LT(largest(ours.param - twin.param), 2e-5) << "step " << i + 1;
          if (sides.left) {
            ASSERT_LT(largest(ours.state.left - twin.L), 1e-5);
          }
          if (sides.right) {
            ASSERT_LT(largest(ours.state.right - twin.R), 1e-5);
          }
          ASSERT_LT(largest(ours.state.exp_avg - twin.M), 1e-6);
          ASSERT_LT(largest(ours.state.exp_avg_sq - twin.V), 1e-5);
        }
      }
    }
  }
}

TEST(SoapMath, power_iteration_comes_to_the_eigenvectors) {
  at::manual_seed(2);
  const at::Tensor turn = std::get<0>(at::linalg_qr(at::randn({17, 17})));
  const at::Tensor values = at::pow(at::full({}, 0.6), at::arange(17, at::kFloat));
  const at::Tensor factor = at::mm(turn * values, turn.t());
  const at::Tensor exact = optim::eigenbasis(factor);
  at::Tensor basis = at::eye(17);
  for (int i = 0; i < 60; ++i) basis = optim::next_basis(factor, basis);
  const at::Tensor overlap = at::mm(exact.t(), basis).abs();  // signs are free
  EXPECT_LT(largest(overlap.slice(0, 0, 10).slice(1, 0, 10) - at::eye(10)), 1e-3);
}

// Products of the huge one would be infinite.
TEST(SoapMath, power_iteration_does_not_depend_on_the_size_of_a_factor) {
  const at::Tensor factor = at::ones({17, 17}) + at::diag(at::linspace(0.1, 1.0, 17));
  const at::Tensor basis = optim::eigenbasis(factor);
  const at::Tensor next = optim::next_basis(factor, basis);
  for (const int exponent : {-100, 126})
    EXPECT_TRUE(at::equal(optim::next_basis(factor * std::ldexp(1.0F, exponent), basis), next)) << exponent;
}

TEST(SoapMath, the_first_gradient_that_is_not_zero_makes_the_basis_and_updates_nothing) {
  Matrix matrix(5, 3);
  EXPECT_TRUE(is_zero(matrix.step(at::zeros({5, 3}))));
  EXPECT_TRUE(is_zero(matrix.state.left_basis));
  EXPECT_TRUE(is_zero(matrix.state.exp_avg));
  EXPECT_TRUE(is_zero(matrix.step(at::randn({5, 3}))));
  EXPECT_FALSE(is_zero(matrix.state.left_basis));
  EXPECT_FALSE(is_zero(matrix.state.right_basis));
  EXPECT_TRUE(is_zero(matrix.state.exp_avg));
  EXPECT_TRUE(is_zero(matrix.state.exp_avg_sq));
  EXPECT_FALSE(is_zero(matrix.step(at::randn({5, 3}))));
}

TEST(SoapMath, zero_gradients_for_ever_let_everything_decay) {
  Matrix matrix(6, 4, {}, 2);
  for (int i = 0; i < 5; ++i) matrix.step(at::randn({6, 4}));
  double norm = matrix.state.exp_avg.norm().item<double>();
  double second = matrix.state.exp_avg_sq.norm().item<double>();
  for (int i = 0; i < 4000; ++i) {
    const at::Tensor update = matrix.step(at::zeros({6, 4}));
    ASSERT_TRUE(is_finite(update));
    const double now = matrix.state.exp_avg.norm().item<double>();
    const double now_second = matrix.state.exp_avg_sq.norm().item<double>();
    ASSERT_LE(now, norm);
    ASSERT_LE(now_second, second);
    norm = now;
    second = now_second;
  }
  EXPECT_LT(norm, 1e-30);
  EXPECT_LT(second, 1e-30);
  EXPECT_TRUE(is_zero(matrix.state.left) || largest(matrix.state.left) < 1e-30);
  const at::Tensor& basis = matrix.state.left_basis;
  EXPECT_LT(largest(at::mm(basis.t(), basis) - at::eye(6)), 1e-5);  // still one
}

TEST(SoapMath, gradients_of_any_size_keep_states_and_updates_finite) {
  for (const float size : {1e-42F, 1e-30F, 1e-22F, 1e-19F, 1e15F, 1e30F, 3e38F}) {
    Matrix matrix(7, 12, {}, 1);
    for (int i = 0; i < 6; ++i) {
      const at::Tensor update = matrix.step(at::randn({7, 12}).clamp(-1.0, 1.0) * size);
      ASSERT_TRUE(is_finite(update)) << size;
      ASSERT_LT(largest(update), 20.0) << size;
      for (const at::Tensor& state :
           {matrix.state.left, matrix.state.right, matrix.state.left_basis, matrix.state.right_basis,
            matrix.state.exp_avg, matrix.state.exp_avg_sq})
        ASSERT_TRUE(is_finite(state)) << size;
    }
    EXPECT_EQ(is_zero(matrix.state.left_basis), size < 1e-23F) << size;  // whose squares are 0
  }
}

// Where AdamW's eps doesn't matter either, updates don't depend on the size of gradients.
TEST(SoapMath, updates_have_the_same_length_for_gradients_of_other_sizes) {
  at::manual_seed(3);
  std::vector<at::Tensor> grads;
  for (int i = 0; i < 6; ++i) grads.push_back(at::randn({9, 6}));
  const auto last = [&](double size) {
    Matrix matrix(9, 6, {}, 2);
    at::Tensor update;
    for (const at::Tensor& grad : grads) update = matrix.step(grad * size);
    return update;
  };
  const at::Tensor usual = last(1.0);
  EXPECT_LT(largest(last(1 << 20) - usual), 1e-4);
  EXPECT_LT(largest(last(1.0 / 1024) - usual), 1e-3);
}

TEST(SoapMath, what_is_not_finite_shows_and_nothing_throws) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (const int before : {0, 3}) {
      Matrix matrix(5, 4, {}, 1);
      for (int i = 0; i < before; ++i) matrix.step(at::randn({5, 4}));
      const at::Tensor basis = matrix.state.left_basis.clone();
      at::Tensor grad = at::randn({5, 4});
      grad[2][1] = bad;
      EXPECT_FALSE(is_finite(matrix.step(grad)));
      EXPECT_TRUE(at::equal(matrix.state.left_basis, basis));
      EXPECT_NO_THROW(matrix.step(at::randn({5, 4})));
    }
  }
}

TEST(SoapMath, sides_sizes_and_costs) {
  EXPECT_EQ(optim::soap_sides(8, 9, 8), (SoapSides{true, false}));
  EXPECT_EQ(optim::soap_sides(8, 9, 9), (SoapSides{true, true}));
  EXPECT_EQ(optim::soap_sides(9, 8, 8), (SoapSides{false, true}));
  EXPECT_EQ(optim::soap_sides(9, 8, 0), (SoapSides{false, false}));
  for (const SoapSides sides : {SoapSides{}, SoapSides{true, false}, SoapSides{false, true}, SoapSides{false, false}}) {
    const SoapState s = optim::make_soap_state(3, 5, sides, at::TensorOptions());
    Index numel = 0;
    for (const at::Tensor& t : {s.left, s.right, s.left_basis, s.right_basis, s.exp_avg, s.exp_avg_sq})
      numel += t.defined() ? t.numel() : 0;
    EXPECT_EQ(optim::soap_state_numel(3, 5, sides), numel);
  }
  // Cubes outweigh the rest for a fresh basis in every step, and are a tenth of that every ten.
  const double every = optim::soap_cost(100, 100, {}, 1);
  const double seldom = optim::soap_cost(100, 100, {}, 10);
  EXPECT_NEAR(every - seldom, 0.9 * 2.0 * 14.0 / 3.0 * 1e6, 1.0);
  EXPECT_GT(optim::soap_cost(100, 100, {}, 10), optim::soap_cost(100, 100, {true, false}, 10));
}

}  // namespace
}  // namespace ragged::test
