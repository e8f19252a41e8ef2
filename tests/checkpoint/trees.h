// Sharded trees with an optimizer, as checkpoints see them: lists of items, and their whole values put together from
// all ranks.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ragged/checkpoint/state.h"
#include "tests/optim/trees.h"

namespace ragged::test {

/// Bytes of whole tensors by name in the checkpoint. Ranks fill in what they own, and compare with it.
class WholeValues {
 public:
  void add(const std::vector<checkpoint::Item>& items);
  /// Names of the tensors of which this rank holds other bytes.
  std::vector<std::string> differing(const std::vector<checkpoint::Item>& items) const;
  std::size_t size() const { return values_.size(); }
  Index bytes() const;

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<std::byte>> values_;
};

/// Bytes of this rank alone, to see whether anything changed.
std::vector<std::byte> bytes_of(const std::vector<checkpoint::Item>& items);
void fill(const std::vector<checkpoint::Item>& items, int value);

}  // namespace ragged::test
