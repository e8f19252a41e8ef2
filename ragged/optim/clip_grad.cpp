#include "ragged/optim/clip_grad.h"

#include <cmath>

#include <ATen/ATen.h>

#include "ragged/base/error.h"

namespace ragged::optim {
namespace {

// fp64 from the first addition on, so that the sum hardly depends on how elements are spread over ranks.
double sum_of_squares(const at::Tensor& flat) {
  if (flat.scalar_type() != at::kFloat || !flat.device().is_cpu()) {
    return flat.to(at::kDouble).square().sum().item<double>();
  }
  const float* values = flat.const_data_ptr<float>();
  double sums[8] = {};  // independent, so that the compiler may vectorise
  const Index numel = flat.numel();
  Index i = 0;
  for (; i + 8 <= numel; i += 8) {
    for (int lane = 0; lane < 8; ++lane) {
      const double value = values[i + lane];
      sums[lane] += value * value;
    }
  }
  for (; i < numel; ++i) sums[0] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  double sum = 0.0;
  for (const double lane : sums) sum += lane;
  return sum;
}

}  // namespace

double grad_norm(fsdp::Unit& root) {
  comm::ProfilerRange range("ragged::grad_norm", "root");
  double sum = 0.0;
  // Padding and parameters without gradient are zero in a shard, so it can be summed whole.
  for (const fsdp::FlatShard& shard : root.flat_shards()) {
    if (shard.grads.defined()) sum += sum_of_squares(shard.grads);
  }
  const comm::MeshGroups& groups = root.groups();
  at::Tensor total = at::full({1}, sum, at::TensorOptions().dtype(at::kDouble)).to(groups.device);
  groups.shard.all_reduce_sum(total, "grad norm").wait();  // replicas hold the same gradients
  return std::sqrt(total.item<double>());
}

GradClip grad_clip(fsdp::Unit& root, double max_norm) {
  RAGGED_CHECK(max_norm > 0.0, "[clip_grad_norm] Expected max_norm > 0, but got {}.", max_norm);
  const double norm = grad_norm(root);
  return {.norm = norm, .factor = std::isfinite(norm) && norm > max_norm ? max_norm / norm : 1.0};
}

double clip_grad_norm(fsdp::Unit& root, double max_norm) {
  const GradClip clip = grad_clip(root, max_norm);
  if (clip.factor == 1.0) return clip.norm;
  for (const fsdp::FlatShard& shard : root.flat_shards()) {
    if (shard.grads.defined()) shard.grads.mul_(clip.factor);
  }
  return clip.norm;
}

}  // namespace ragged::optim
