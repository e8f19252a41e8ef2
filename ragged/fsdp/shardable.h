// Lets a block call its children without knowing whether they are sharded: derive from Shardable beside
// torch::nn::Module, and write call(*child, x) where you would write child->forward(x).
#pragma once

#include <memory>

namespace ragged::fsdp {

class Unit;

class Shardable {
 public:
  /// The unit that fully_shard made of this module; null before.
  std::shared_ptr<Unit> unit() const { return unit_.lock(); }

 protected:
  ~Shardable() = default;

 private:
  friend class Unit;
  std::weak_ptr<Unit> unit_;  // the caller or the parent unit owns it
};

}  // namespace ragged::fsdp
