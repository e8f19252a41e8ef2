#include "tests/optim/trees.h"

#include <ATen/ATen.h>

namespace ragged::test {

Tree make_tree(comm::World& world, const MeshShape& mesh, bool whole_tensors) {
  Tree tree;
  tree.model = make_tiny_model();
  fsdp::FullyShardOptions options;
  options.groups = world.groups(mesh.mesh());
  if (whole_tensors) {
    options.shard_policy = [](const fsdp::ParamInfo& param) -> std::optional<plan::Block> {
      return plan::rows(param.shape[0]);
    };
  }
  std::vector<std::shared_ptr<fsdp::Unit>> units;
  for (const auto& layer : tree.model->layers) units.push_back(fsdp::fully_shard(*layer, options));
  tree.root = fsdp::fully_shard(*tree.model, options);
  return tree;
}

void backward(Tree& tree, int rank, int step) {
  const Batch batch = make_batch({}, step, rank, 0);
  tree.root->call(*tree.model, batch.tokens, batch.targets).backward();
}

std::vector<float> made_up_gradient(const std::string& name, Index numel, int step) {
  std::vector<float> values(static_cast<std::size_t>(numel));
  fsdp::fill_initial_values(
      fsdp::normal(0.0, 0.1), static_cast<std::uint64_t>(step) + 1000, name, {0, numel}, values.data());
  return values;
}

void make_up_gradients(fsdp::Unit& root, int step) {
  for (const buffer::ShardedTensor& grad : root.sharded_gradients()) {
    const std::vector<float> piece = cut(made_up_gradient(grad.name, numel_of(grad), step), grad.owned);
    std::copy(piece.begin(), piece.end(), grad.local.mutable_data_ptr<float>());
  }
}

Index numel_of(const buffer::ShardedTensor& tensor) {
  return checked_product(tensor.shape);
}

std::vector<float> values_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().to(at::kFloat).contiguous();
  return {flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel()};
}

std::vector<float> cut(const std::vector<float>& whole, layout::Interval owned) {
  return {whole.begin() + owned.begin, whole.begin() + owned.end};
}

}  // namespace ragged::test
