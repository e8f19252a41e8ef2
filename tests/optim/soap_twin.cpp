#include "tests/optim/soap_twin.h"

#include <cmath>

#include <gtest/gtest.h>

namespace ragged::test {
namespace {

double largest(const at::Tensor& x) {
  return x.abs().max().item<double>();
}

}  // namespace

SoapTwin::SoapTwin(const at::Tensor& start) : param(start.detach().to(at::kDouble).clone()) {
  const auto zeros = [](int64_t m, int64_t n) { return at::zeros({m, n}, at::kDouble); };
  const int64_t rows = param.size(0);
  const int64_t cols = param.size(1);
  L = zeros(rows, rows);
  R = zeros(cols, cols);
  M = zeros(rows, cols);
  V = zeros(rows, cols);
}

void SoapTwin::step(
    const at::Tensor& grad, double lr, double decay, const at::Tensor& next_left, const at::Tensor& next_right) {
  ++steps;
  const at::Tensor G = grad.to(at::kDouble);
  param = param * (1.0 - lr * decay);
  const bool is_first = steps == 1 && (left || right);
  if (!is_first) {
    const at::Tensor from_left = left ? Q_L : at::eye(G.size(0), at::kDouble);
    const at::Tensor from_right = right ? Q_R : at::eye(G.size(1), at::kDouble);
    const int t = left || right ? steps - 1 : steps;
    const at::Tensor turned = at::mm(at::mm(from_left.t(), G), from_right);
    M = M * beta1 + G * (1.0 - beta1);
    const at::Tensor turned_moment = at::mm(at::mm(from_left.t(), M), from_right);
    V = V * beta2 + turned * turned * (1.0 - beta2);
    const at::Tensor first = turned_moment / (1.0 - std::pow(beta1, t));
    const at::Tensor second = V / (1.0 - std::pow(beta2, t));
    param = param - at::mm(at::mm(from_left, first / (second.sqrt() + eps)), from_right.t()) * lr;
  }
  L = L * beta2 + at::mm(G, G.t()) * (1.0 - beta2);
  R = R * beta2 + at::mm(G.t(), G) * (1.0 - beta2);
  const bool is_due = steps > 1 && (steps - 1) % frequency == 0;
  if (!is_first && !is_due) return;
  if (left) adopt(L, Q_L, next_left, is_first);
  if (right) adopt(R, Q_R, next_right, is_first);
}

void SoapTwin::adopt(const at::Tensor& factor, at::Tensor& basis, const at::Tensor& given, bool is_first) const {
  const at::Tensor next = given.to(at::kDouble).clone();
  EXPECT_LT(largest(at::mm(next.t(), next) - at::eye(next.size(0), at::kDouble)), 1e-5) << "step " << steps;
  if (is_first) {  // eigenvectors, largest eigenvalue first
    const at::Tensor turned = at::mm(at::mm(next.t(), factor), next);
    const at::Tensor values = turned.diagonal();
    EXPECT_LT(largest(turned - at::diag(values)), 1e-5 * largest(factor));
    EXPECT_GT(
        (values - at::cat({values.slice(0, 1), values.slice(0, -1)})).min().item<double>(), -1e-5 * largest(factor));
  } else {  // S = P Q; S = next * (upper triangular)
    const at::Tensor product = at::mm(factor, basis);
    const at::Tensor upper = at::mm(next.t(), product);
    EXPECT_LT(largest(upper.tril(-1)), 1e-5 * largest(factor)) << "step " << steps;
  }
  basis = next;
}

}  // namespace ragged::test
