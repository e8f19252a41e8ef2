#include "ragged/optim/soap_math.h"

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>

namespace ragged::optim {
namespace {

// The moving average x <- x * a + y * b, each product rounded by itself, as the kernels of AdamW do it.
void move(const at::Tensor& x, float a, const at::Tensor& y, float b) {
  x.mul_(a).add_(y * b);
}

at::Tensor bounded_gradient(const at::Tensor& grad) {
  const double limit = kLargestGradient / std::sqrt(static_cast<double>(std::max<Index>(1, grad.numel())));
  const at::Tensor clamped = grad.clamp(-limit, limit);  // keeps NaN
  return at::where(grad.isinf(), grad, clamped);
}

at::Tensor rotated(const at::Tensor& x, const SoapState& state) {
  at::Tensor y = x;
  if (state.left_basis.defined()) y = at::mm(state.left_basis.t(), y);
  if (state.right_basis.defined()) y = at::mm(y, state.right_basis);
  return y;
}

at::Tensor rotated_back(const at::Tensor& x, const SoapState& state) {
  at::Tensor y = x;
  if (state.left_basis.defined()) y = at::mm(state.left_basis, y);
  if (state.right_basis.defined()) y = at::mm(y, state.right_basis.t());
  return y;
}

// Adam's moments and its quotient, without the correction of the first one. Written as adamw_math.h has it, so that
// without a basis this is AdamW.
at::Tensor adam_update(const at::Tensor& grad, const SoapState& state, const AdamWStep& s) {
  const at::Tensor turned = rotated(grad, state);
  move(state.exp_avg, s.beta1, grad, s.one_minus_beta1);
  move(state.exp_avg_sq, s.beta2, turned * turned, s.one_minus_beta2);
  const at::Tensor root = state.exp_avg_sq.sqrt().div_(s.root_correction2).add_(s.eps);
  return rotated_back(rotated(state.exp_avg, state) / root, state);
}

void accumulate(const at::Tensor& grad, const SoapState& state, const AdamWStep& s) {
  if (state.left.defined()) move(state.left, s.beta2, at::mm(grad, grad.t()), s.one_minus_beta2);
  if (state.right.defined()) move(state.right, s.beta2, at::mm(grad.t(), grad), s.one_minus_beta2);
}

// The largest magnitude where that is finite and not 0, else 0.
float usable_magnitude(const at::Tensor& factor) {
  const auto largest = factor.abs().max().item<float>();
  return std::isfinite(largest) ? largest : 0.0F;
}

// A basis has no column of zeros.
bool is_made(const at::Tensor& basis) {
  return basis.select(1, 0).any().item<bool>();
}

bool waits_for_basis(const SoapState& state) {
  const at::Tensor& basis = state.left_basis.defined() ? state.left_basis : state.right_basis;
  return basis.defined() && !is_made(basis);
}

// Both or none: what of a tiny gradient is 0 in one factor may not be in the other, which sums up more squares.
void make_bases(const SoapState& state) {
  for (const at::Tensor& factor : {state.left, state.right}) {
    if (factor.defined() && usable_magnitude(factor) == 0.0F) return;
  }
  if (state.left.defined()) state.left_basis.copy_(eigenbasis(state.left));
  if (state.right.defined()) state.right_basis.copy_(eigenbasis(state.right));
}

void refresh_bases(const SoapState& state) {
  if (state.left.defined()) state.left_basis.copy_(next_basis(state.left, state.left_basis));
  if (state.right.defined()) state.right_basis.copy_(next_basis(state.right, state.right_basis));
}

}  // namespace

SoapState make_soap_state(Index rows, Index cols, SoapSides sides, const at::TensorOptions& options) {
  const auto zeros = [&options](Index m, Index n) { return at::zeros({m, n}, options.dtype(at::kFloat)); };
  SoapState state;
  if (sides.left) {
    state.left = zeros(rows, rows);
    state.left_basis = zeros(rows, rows);
  }
  if (sides.right) {
    state.right = zeros(cols, cols);
    state.right_basis = zeros(cols, cols);
  }
  state.exp_avg = zeros(rows, cols);
  state.exp_avg_sq = zeros(rows, cols);
  return state;
}

at::Tensor soap_update(const at::Tensor& grad, const SoapState& state, const SoapStep& step) {
  const at::Tensor g = bounded_gradient(grad);
  if (waits_for_basis(state)) {
    accumulate(g, state, step.adam);
    make_bases(state);
    return g - g;  // zeros, but for what isn't finite
  }
  at::Tensor update = adam_update(g, state, step.adam);
  accumulate(g, state, step.adam);
  if (step.refreshes_basis) refresh_bases(state);
  return update;
}

at::Tensor eigenbasis(const at::Tensor& factor) {
  return std::get<1>(at::linalg_eigh(factor.to(at::kDouble))).flip(1).to(at::kFloat).contiguous();
}

at::Tensor next_basis(const at::Tensor& factor, const at::Tensor& basis) {
  const float largest = usable_magnitude(factor);
  if (largest == 0.0F) return basis;
  // By a power of two, so that what is tiny or huge is neither lost nor infinite in the product.
  const float scale = std::ldexp(1.0F, -std::max(std::ilogb(largest), -126));
  return std::get<0>(at::linalg_qr(at::mm(factor * scale, basis))).contiguous();
}

}  // namespace ragged::optim
