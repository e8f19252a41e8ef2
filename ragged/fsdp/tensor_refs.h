// Finds the tensors inside ordinary C++ values, so that a unit can replace them: arguments before a forward,
// results after it. What it doesn't know passes through untouched.
#pragma once

#include <array>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ragged::fsdp {

/// Pointers into values owned by somebody else; valid while those aren't moved.
using TensorRefs = std::vector<at::Tensor*>;

template <class T>
void collect_tensors(T&, TensorRefs&) {}
inline void collect_tensors(at::Tensor& tensor, TensorRefs& refs) {
  if (tensor.defined()) refs.push_back(&tensor);
}
// Declared before any is defined, so that they find each other in nested values.
template <class T>
void collect_tensors(std::optional<T>& value, TensorRefs& refs);
template <class T>
void collect_tensors(std::vector<T>& values, TensorRefs& refs);
template <class T, std::size_t N>
void collect_tensors(std::array<T, N>& values, TensorRefs& refs);
template <class A, class B>
void collect_tensors(std::pair<A, B>& values, TensorRefs& refs);
template <class... T>
void collect_tensors(std::tuple<T...>& values, TensorRefs& refs);

template <class T>
void collect_tensors(std::optional<T>& value, TensorRefs& refs) {
  if (value) collect_tensors(*value, refs);
}
template <class T>
void collect_tensors(std::vector<T>& values, TensorRefs& refs) {
  for (T& value : values) collect_tensors(value, refs);
}
template <class T, std::size_t N>
void collect_tensors(std::array<T, N>& values, TensorRefs& refs) {
  for (T& value : values) collect_tensors(value, refs);
}
template <class A, class B>
void collect_tensors(std::pair<A, B>& values, TensorRefs& refs) {
  collect_tensors(values.first, refs);
  collect_tensors(values.second, refs);
}
template <class... T>
void collect_tensors(std::tuple<T...>& values, TensorRefs& refs) {
  std::apply([&refs](auto&... value) { (collect_tensors(value, refs), ...); }, values);
}

}  // namespace ragged::fsdp
