// Compiled with -ffp-contract=off, like what it is the twin of.
#include "tests/support/reference.h"

#include <cmath>

#include <ATen/ATen.h>

namespace ragged::test {

Reference::Reference(const ReferenceOptions& options) : options_(options), model_(make_tiny_model(options.model)) {
  for (const auto& item : model_->named_parameters()) masters_[item.key()] = item.value().detach().clone();
}

std::vector<double> Reference::forward_backward(int step) {
  gradients_.clear();
  const int ranks = options_.mesh.size();
  std::vector<double> losses;
  // addends[rank][name]: what a rank puts into its reduce buffer.
  std::vector<std::map<std::string, at::Tensor>> addends(static_cast<std::size_t>(ranks));
  const auto reduce = [&] {
    for (const auto& [name, master] : masters_) {
      bool used = false;
      at::Tensor over_replicas;
      for (int replica = 0; replica < options_.mesh.replicate; ++replica) {
        at::Tensor over_shards;
        for (int s = 0; s < options_.mesh.shard; ++s) {
          auto& mine = addends[static_cast<std::size_t>(replica * options_.mesh.shard + s)];
          used = used || mine.count(name) > 0;
          const at::Tensor addend = mine.count(name) ? mine[name].to(at::kFloat) : at::zeros_like(master);
          over_shards = over_shards.defined() ? over_shards + addend : addend.clone();
        }
        over_replicas = over_replicas.defined() ? over_replicas + over_shards : over_shards;
      }
      if (!used) continue;
      const at::Tensor mean = over_replicas * (1.0 / ranks);
      gradients_[name] = gradients_.count(name) ? gradients_[name] + mean : mean;
    }
    for (auto& mine : addends) mine.clear();
  };
  for (int micro = 0; micro < options_.micro_batches; ++micro) {
    losses.clear();
    for (int rank = 0; rank < ranks; ++rank) {
      for (auto& item : model_->named_parameters()) {
        at::Tensor param = item.value();
        param.mutable_grad().reset();
        const at::NoGradGuard no_grad;
        param.set_data(masters_[item.key()].to(options_.param_dtype, false, /*copy=*/true));
      }
      const Batch batch = make_batch(options_.model, step, rank, micro);
      const at::Tensor loss = model_->forward(batch.tokens, batch.targets);
      loss.backward();
      losses.push_back(loss.item<double>());
      auto& mine = addends[static_cast<std::size_t>(rank)];
      for (const auto& item : model_->named_parameters()) {
        if (!item.value().grad().defined()) continue;
        const at::Tensor grad = item.value().grad().to(options_.reduce_dtype);
        mine[item.key()] = mine.count(item.key()) ? mine[item.key()] + grad : grad.clone();
      }
    }
    if (options_.sync_each_micro_batch || micro + 1 == options_.micro_batches) reduce();
  }
  return losses;
}

double Reference::grad_norm() const {
  double sum = 0.0;
  for (const auto& [name, grad] : gradients_) sum += grad.to(at::kDouble).square().sum().item<double>();
  return std::sqrt(sum);
}

void Reference::scale_gradients(double factor) {
  for (auto& [name, grad] : gradients_) grad.mul_(factor);
}

void Reference::adamw_step() {
  constexpr double kBeta1 = 0.9;
  constexpr double kBeta2 = 0.95;
  constexpr double kEps = 1e-8;
  for (auto& [name, grad] : gradients_) {
    at::Tensor& master = masters_[name];
    if (!exp_avg_.count(name)) {
      exp_avg_[name] = at::zeros_like(master);
      exp_avg_sq_[name] = at::zeros_like(master);
    }
    const int t = ++steps_[name];
    const auto decay = static_cast<float>(master.dim() >= 2 ? 1.0 - options_.lr * options_.weight_decay : 1.0);
    const auto step_size = static_cast<float>(options_.lr / (1.0 - std::pow(kBeta1, t)));
    const auto root = static_cast<float>(std::sqrt(1.0 - std::pow(kBeta2, t)));
    auto* p = master.mutable_data_ptr<float>();
    auto* m = exp_avg_[name].mutable_data_ptr<float>();
    auto* v = exp_avg_sq_[name].mutable_data_ptr<float>();
    const at::Tensor contiguous = grad.contiguous();
    const auto* g = contiguous.const_data_ptr<float>();
    for (int64_t i = 0; i < master.numel(); ++i) {
      m[i] = static_cast<float>(kBeta1) * m[i] + static_cast<float>(1.0 - kBeta1) * g[i];
      v[i] = static_cast<float>(kBeta2) * v[i] + static_cast<float>(1.0 - kBeta2) * (g[i] * g[i]);
      p[i] = p[i] * decay - step_size * (m[i] / (std::sqrt(v[i]) / root + static_cast<float>(kEps)));
    }
  }
}

}  // namespace ragged::test
