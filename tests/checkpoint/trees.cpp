#include "tests/checkpoint/trees.h"

#include <ATen/ATen.h>

namespace ragged::test {

void WholeValues::add(const std::vector<checkpoint::Item>& items) {
  const std::lock_guard lock(mutex_);
  for (const checkpoint::Item& item : items) {
    const std::size_t size = item.tensor.local.element_size();
    std::vector<std::byte>& whole = values_[item.name];
    whole.resize(static_cast<std::size_t>(checked_product(item.tensor.shape)) * size);
    if (item.tensor.owned.empty()) continue;
    std::memcpy(
        whole.data() + static_cast<std::size_t>(item.tensor.owned.begin) * size, item.tensor.local.const_data_ptr(),
        item.tensor.local.nbytes());
  }
}

std::vector<std::string> WholeValues::differing(const std::vector<checkpoint::Item>& items) const {
  std::vector<std::string> names;
  for (const checkpoint::Item& item : items) {
    if (item.tensor.owned.empty()) continue;
    const std::byte* whole = values_.at(item.name).data() +
        static_cast<std::size_t>(item.tensor.owned.begin) * item.tensor.local.element_size();
    if (std::memcmp(whole, item.tensor.local.const_data_ptr(), item.tensor.local.nbytes()) != 0) {
      names.push_back(item.name);
    }
  }
  return names;
}

Index WholeValues::bytes() const {
  Index bytes = 0;
  for (const auto& [name, value] : values_) bytes += static_cast<Index>(value.size());
  return bytes;
}

std::vector<std::byte> bytes_of(const std::vector<checkpoint::Item>& items) {
  std::vector<std::byte> bytes;
  for (const checkpoint::Item& item : items) {
    const auto* data = static_cast<const std::byte*>(item.tensor.local.const_data_ptr());
    bytes.insert(bytes.end(), data, data + item.tensor.local.nbytes());
  }
  return bytes;
}

void fill(const std::vector<checkpoint::Item>& items, int value) {
  for (const checkpoint::Item& item : items) item.tensor.local.detach().fill_(value);
}

}  // namespace ragged::test
