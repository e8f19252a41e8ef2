// What the plans of matrix optimizers are made from, as Python gives it: lists by parameter.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "python/bindings/bindings.h"
#include "ragged/optim/matrix_layout.h"

namespace ragged::python {

/// By rank of the shard group: (begin, end) of what it holds of a parameter.
using Intervals = std::vector<std::pair<Index, Index>>;

/// `splits` and `flatten` are those of all of them.
inline std::vector<optim::MatrixParam> matrix_params(
    const std::vector<std::string>& names, const std::vector<std::vector<Index>>& shapes,
    const std::vector<Intervals>& held, const std::vector<Index>& splits, const std::vector<int>& buckets,
    bool flatten) {
  std::vector<optim::MatrixParam> params;
  for (std::size_t i = 0; i < names.size(); ++i) {
    std::vector<layout::Interval> intervals;
    for (const auto& [begin, end] : held[i]) intervals.push_back({begin, end});
    params.push_back(
        {.name = names[i],
         .shape = shapes[i],
         .held = std::move(intervals),
         .row_ranges = optim::ranges_of_rows(splits),
         .bucket = buckets[i],
         .flatten_rest = flatten});
  }
  return params;
}

/// (parameter, rows, columns, root, whether the root holds all of it) of each.
inline std::vector<std::tuple<int, Index, Index, int, bool>> as_tuples(
    const std::vector<optim::ParamMatrix>& matrices) {
  std::vector<std::tuple<int, Index, Index, int, bool>> found;
  for (const optim::ParamMatrix& m : matrices) found.emplace_back(m.param, m.rows, m.cols, m.root, m.is_local);
  return found;
}

}  // namespace ragged::python
