// Index mathematics of placements, for the Python side: plain integers and tuples, no tensors.
#include "python/bindings/bindings.h"
#include "ragged/layout/box.h"
#include "ragged/layout/overlap.h"
#include "ragged/layout/placement.h"

namespace ragged::python {
namespace {

using layout::Interval;
using Shape = std::vector<Index>;

std::pair<Index, Index> pair_of(Interval interval) {
  return {interval.begin, interval.end};
}

std::vector<Interval> intervals_of(const std::vector<std::pair<Index, Index>>& pairs) {
  std::vector<Interval> intervals;
  for (const auto& [begin, end] : pairs) intervals.push_back({begin, end});
  return intervals;
}

}  // namespace

void bind_layout(py::module_& module) {
  module.def(
      "normalize_ragged",
      [](int dims, Shape units) {
        const layout::RaggedShard placement(dims, std::move(units));
        return std::pair{placement.dims(), placement.local_units()};
      },
      "(dims, units) -> the same with units divided by their gcd. Raises InvalidArgument on nonsense.", py::arg("dims"),
      py::arg("units"));
  module.def(
      "ragged_intervals",
      [](const Shape& shape, int dims, Shape units) {
        const layout::RaggedShard placement(dims, std::move(units));
        std::vector<std::pair<Index, Index>> owned;
        for (int rank = 0; rank < placement.world_size(); ++rank)
          owned.push_back(pair_of(layout::ragged_interval(shape, placement, rank)));
        return owned;
      },
      "Flat half-open interval of each rank in a row-major tensor of this shape.", py::arg("shape"), py::arg("dims"),
      py::arg("units"));
  module.def(
      "ragged_from_intervals",
      [](const Shape& shape, const std::vector<std::pair<Index, Index>>& by_rank) {
        const auto placement = layout::ragged_from_intervals(shape, intervals_of(by_rank));
        return std::pair{placement.dims(), placement.local_units()};
      },
      "(dims, units) of the placement that gives rank r the r-th interval.", py::arg("shape"), py::arg("by_rank"));
  module.def(
      "boxes",
      [](const Shape& shape, Index begin, Index end) {
        std::vector<std::pair<Shape, Shape>> found;
        for (layout::Box& box : layout::boxes(shape, {begin, end}))
          found.emplace_back(std::move(box.offset), std::move(box.size));
        return found;
      },
      "[(offset, size)] of the at most 2n-1 boxes that a flat interval covers, in order of their elements.",
      py::arg("shape"), py::arg("begin"), py::arg("end"));
  module.def(
      "overlaps",
      [](const std::vector<std::pair<Index, Index>>& from, const std::vector<std::pair<Index, Index>>& to) {
        std::vector<std::tuple<int, int, Index, Index>> moves;
        for (const layout::Overlap& move : layout::overlaps(intervals_of(from), intervals_of(to)))
          moves.emplace_back(move.source, move.target, move.interval.begin, move.interval.end);
        return moves;
      },
      "[(source, target, begin, end)]: what each rank sends to each other when a flat tensor moves between layouts.",
      py::arg("source"), py::arg("target"));
  module.def(
      "raise_block_for_shard",
      [](const Shape& local_shape, Index block, int dim) {
        return layout::raise_block_for_shard(local_shape, block, dim);
      },
      "Block in elements that doesn't cut through dim `dim` > 0 of a tensor that a foreign Shard(dim) left here.",
      py::arg("local_shape"), py::arg("block"), py::arg("dim"));
}

}  // namespace ragged::python
