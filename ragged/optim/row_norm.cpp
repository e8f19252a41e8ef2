#include "ragged/optim/row_norm.h"

#include <ATen/ATen.h>

namespace ragged::optim {

at::Tensor row_normalised(const at::Tensor& update, const at::Tensor& row_exp_avg_sq, double beta2) {
  constexpr float kEps = 1e-10F;
  const auto kept = static_cast<float>(beta2);
  const at::Tensor squares = update.square();
  row_exp_avg_sq.mul_(kept).add_(squares.mean(-1), 1.0F - kept);
  const at::Tensor scaled = update / (row_exp_avg_sq.sqrt() + kEps).unsqueeze(-1);
  const at::Tensor before = squares.sum().sqrt();
  const at::Tensor after = scaled.square().sum().sqrt();
  return at::where(after > 0, scaled * (before / after), at::zeros({}, update.options()));
}

}  // namespace ragged::optim
