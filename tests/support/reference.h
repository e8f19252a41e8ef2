// The slow obvious twin of sharded training: one process, whole tensors, ranks in turn. Same dtypes and casts, sums in
// fp32 in rank order (HSDP: within the shard group, then over replicas), so results can be compared bit for bit.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/support/ranks.h"
#include "tests/support/tiny_model.h"

namespace ragged::test {

struct ReferenceOptions {
  MeshShape mesh;
  at::ScalarType param_dtype = at::kFloat;
  at::ScalarType reduce_dtype = at::kFloat;
  int micro_batches = 1;
  bool sync_each_micro_batch = false;
  TinyConfig model;
  double lr = 1e-2;
  double weight_decay = 0.1;
};

class Reference {
 public:
  explicit Reference(const ReferenceOptions& options);

  /// Losses by rank of the last micro-batch; fills gradients().
  std::vector<double> forward_backward(int step);
  /// By name; a parameter that nobody used is absent.
  std::map<std::string, at::Tensor>& gradients() { return gradients_; }
  double grad_norm() const;
  /// Scales gradients by a clip factor that the sharded run computed.
  void scale_gradients(double factor);
  void adamw_step();
  const std::map<std::string, at::Tensor>& parameters() const { return masters_; }

 private:
  ReferenceOptions options_;
  std::map<std::string, at::Tensor> masters_, gradients_, exp_avg_, exp_avg_sq_;
  std::map<std::string, int> steps_;
  std::shared_ptr<TinyModel> model_;
};

}  // namespace ragged::test
