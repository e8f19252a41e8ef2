// Modules whose forward a test writes on the spot.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include "ragged/fsdp/init.h"
#include "ragged/fsdp/unit.h"
#include "tests/support/ranks.h"

namespace ragged::test {

struct Block : torch::nn::Module, fsdp::Shardable {
  using Forward = std::function<at::Tensor(Block&, const at::Tensor&)>;

  /// Parameters p0, p1, ... of these shapes, with values from their index.
  Block(const std::vector<std::vector<int64_t>>& shapes, Forward forward_function)
      : function(std::move(forward_function)) {
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      at::Tensor value = at::zeros(shapes[i]);
      fsdp::fill_initial_values(
          fsdp::normal(0.0, 0.5), 11, "p" + std::to_string(i), {0, value.numel()}, value.mutable_data_ptr<float>());
      p.push_back(register_parameter("p" + std::to_string(i), value.requires_grad_(true)));
    }
  }

  std::shared_ptr<Block> add(const std::string& name, std::shared_ptr<Block> child) {
    children_.push_back(register_module(name, std::move(child)));
    return children_.back();
  }
  Block& child(std::size_t i) { return *children_[i]; }

  at::Tensor forward(const at::Tensor& x) { return function(*this, x); }

  std::vector<at::Tensor> p;
  Forward function;

 private:
  std::vector<std::shared_ptr<Block>> children_;
};

/// x -> tanh(x W^T), W of 4 x 4.
inline std::shared_ptr<Block> linear_block() {
  return std::make_shared<Block>(std::vector<std::vector<int64_t>>{{4, 4}}, [](Block& b, const at::Tensor& x) {
    return at::tanh(at::linear(x, b.p[0]));
  });
}

/// A root of `count` linear blocks in a row with a scale of its own; mean of the result.
inline std::shared_ptr<Block> chain(int count) {
  auto root = std::make_shared<Block>(std::vector<std::vector<int64_t>>{{4}}, [count](Block& b, const at::Tensor& x) {
    at::Tensor y = x * b.p[0];
    for (int i = 0; i < count; ++i) y = fsdp::call(b.child(static_cast<std::size_t>(i)), y);
    return y.mean();
  });
  for (int i = 0; i < count; ++i) root->add("layer" + std::to_string(i), linear_block());
  return root;
}

inline at::Tensor input_of(int rank, int step = 0) {
  return at::arange(8, at::kFloat).view({2, 4}) * 0.1 + static_cast<double>(rank) * 0.3 +
      static_cast<double>(step) * 0.05;
}

/// Shards the children, then the root.
inline std::shared_ptr<fsdp::Unit> shard_chain(Block& root, std::size_t count, const fsdp::FullyShardOptions& options) {
  std::vector<std::shared_ptr<fsdp::Unit>> units;
  for (std::size_t i = 0; i < count; ++i) units.push_back(fsdp::fully_shard(root.child(i), options));
  return fsdp::fully_shard(root, options);
}

/// Whole gradients by name: pieces of all ranks put together. Collective. Parameters without gradient are absent.
inline std::map<std::string, at::Tensor> whole_gradients(fsdp::Unit& root, const comm::Communicator& all) {
  std::map<std::string, at::Tensor> whole;
  for (const buffer::ShardedTensor& piece : root.sharded_gradients()) {
    at::Tensor full = at::zeros({checked_product(piece.shape)});
    full.narrow(0, piece.owned.begin, piece.owned.size()).copy_(piece.local);
    all.all_reduce_sum(full, "test").wait();
    whole[piece.name] = full.view(piece.shape);
  }
  return whole;
}

}  // namespace ragged::test
