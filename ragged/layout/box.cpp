#include "ragged/layout/box.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace ragged::layout {
namespace {

// Walks down the dims: at each one the interval is a ragged head, whole slabs and a ragged tail.
// Head and tail lie in one slab each, so they are the same question one dim deeper; after the first
// split only one of the two is left on each side, which is why there are never more than 2n-1
// boxes.
class BoxCover {
 public:
  explicit BoxCover(std::span<const Index> shape)
      : shape_(shape),
        stride_(shape.size()),
        box_{std::vector<Index>(shape.size(), 0), std::vector<Index>(shape.begin(), shape.end())} {
    Index stride = 1;
    for (std::size_t dim = shape.size(); dim-- > 0;) {
      stride_[dim] = stride;
      stride *= shape[dim];
    }
  }

  // `interval` is relative to the slab that the dims before `dim` have picked.
  void cover(std::size_t dim, Interval interval) {
    if (interval.empty()) return;
    const Index slab = stride_[dim];
    Index first = interval.begin / slab;
    const Index last = interval.end / slab;
    const Index head = interval.begin % slab;
    const Index tail = interval.end % slab;
    if (first == last) {
      descend(dim, first, {head, tail});
      return;
    }
    if (head != 0) descend(dim, first++, {head, slab});
    if (first < last) emit(dim, first, last - first);
    if (tail != 0) descend(dim, last, {0, tail});
  }

  std::vector<Box> take() { return std::move(boxes_); }

 private:
  void descend(std::size_t dim, Index at, Interval interval) {
    box_.offset[dim] = at;
    box_.size[dim] = 1;
    cover(dim + 1, interval);
    box_.offset[dim] = 0;
    box_.size[dim] = shape_[dim];
  }

  void emit(std::size_t dim, Index offset, Index size) {
    Box box = box_;
    box.offset[dim] = offset;
    box.size[dim] = size;
    boxes_.push_back(std::move(box));
  }

  std::span<const Index> shape_;
  std::vector<Index> stride_;
  Box box_;  // the dims already picked, whole in the rest
  std::vector<Box> boxes_;
};

}  // namespace

std::vector<Box> boxes(std::span<const Index> shape, Interval interval) {
  const Index numel = checked_product(shape);
  if (interval.empty()) return {};
  RAGGED_CHECK(
      interval.begin >= 0 && interval.end <= numel,
      "[boxes] Expected an interval within the tensor's {} elements, but got [{}, {}).", numel, interval.begin,
      interval.end);
  if (shape.empty()) return {Box{}};
  BoxCover cover(shape);
  cover.cover(0, interval);
  return cover.take();
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  RAGGED_CHECK(
      a.offset.size() == a.size.size() && b.offset.size() == b.size.size() && a.offset.size() == b.offset.size(),
      "[intersect] Expected boxes of equal rank, but got {} and {} dims.", a.offset.size(), b.offset.size());
  Box common;
  common.offset.reserve(a.offset.size());
  common.size.reserve(a.offset.size());
  for (std::size_t dim = 0; dim < a.offset.size(); ++dim) {
    const Interval part = intersect(
        Interval{a.offset[dim], a.offset[dim] + a.size[dim]}, Interval{b.offset[dim], b.offset[dim] + b.size[dim]});
    if (part.empty()) return std::nullopt;
    common.offset.push_back(part.begin);
    common.size.push_back(part.size());
  }
  return common;
}

Interval flat_interval(std::span<const Index> shape, const Box& box) {
  checked_product(shape);
  RAGGED_CHECK(
      box.offset.size() == shape.size() && box.size.size() == shape.size(),
      "[flat_interval] Expected a box of {} dims, but got {} offsets and {} sizes.", shape.size(), box.offset.size(),
      box.size.size());
  bool is_empty = false;
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    RAGGED_CHECK(
        box.offset[dim] >= 0 && box.size[dim] >= 0 && box.size[dim] <= shape[dim] &&
            box.offset[dim] <= shape[dim] - box.size[dim],
        "[flat_interval] Expected a box within the shape [{}], but got offset [{}], size [{}].", fmt::join(shape, ", "),
        fmt::join(box.offset, ", "), fmt::join(box.size, ", "));
    is_empty = is_empty || box.size[dim] == 0;
  }
  if (is_empty) return {};

  // Contiguous means: one element in each leading dim, then any range of one dim, then everything.
  bool is_whole_so_far = true;
  Index begin = 0;
  Index stride = 1;
  Index length = 1;
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    RAGGED_CHECK(
        is_whole_so_far || box.size[dim] == 1,
        "[flat_interval] Expected a box that is contiguous in the shape [{}], but got size [{}].",
        fmt::join(shape, ", "), fmt::join(box.size, ", "));
    is_whole_so_far = is_whole_so_far && box.size[dim] == shape[dim];
    begin += box.offset[dim] * stride;
    stride *= shape[dim];
    length *= box.size[dim];
  }
  return {begin, begin + length};
}

}  // namespace ragged::layout
