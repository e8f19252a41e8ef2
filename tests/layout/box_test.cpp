#include "ragged/layout/box.h"

#include "tests/support/expect_error.h"
#include "tests/support/seeded.h"

namespace ragged::layout {
namespace {

using ::ragged::testing::Seeded;

using Shape = std::vector<Index>;

// The flat positions of a box's elements in row-major order of the box: an odometer, nothing
// clever.
std::vector<Index> positions(const Shape& shape, const Box& box) {
  std::vector<Index> result;
  std::vector<Index> at(shape.size(), 0);
  const Index count = box.numel();
  for (Index i = 0; i < count; ++i) {
    Index flat = 0;
    for (std::size_t dim = 0; dim < shape.size(); ++dim) {
      flat = flat * shape[dim] + box.offset[dim] + at[dim];
    }
    result.push_back(flat);
    for (std::size_t dim = shape.size(); dim-- > 0;) {
      if (++at[dim] < box.size[dim]) break;
      at[dim] = 0;
    }
  }
  return result;
}

void expect_exact_cover(const Shape& shape, Interval interval) {
  SCOPED_TRACE(
      "shape " + ::testing::PrintToString(shape) + ", interval [" + std::to_string(interval.begin) + ", " +
      std::to_string(interval.end) + ")");
  const std::vector<Box> cover = boxes(shape, interval);
  const std::size_t most = shape.empty() ? 1 : 2 * shape.size() - 1;
  EXPECT_LE(cover.size(), most);
  Index next = interval.begin;
  for (const Box& box : cover) {
    ASSERT_EQ(box.offset.size(), shape.size());
    ASSERT_EQ(box.size.size(), shape.size());
    ASSERT_GT(box.numel(), 0);
    const Interval flat = flat_interval(shape, box);
    EXPECT_EQ(flat.begin, next);
    EXPECT_EQ(flat.size(), box.numel());
    for (Index position : positions(shape, box)) ASSERT_EQ(position, next++);
  }
  EXPECT_EQ(next, std::max(interval.begin, interval.end));
}

TEST(Boxes, cut_a_matrix_into_head_rows_and_tail) {
  const Shape shape{3, 4};
  const std::vector<Box> expected{{{0, 2}, {1, 2}}, {{1, 0}, {1, 4}}, {{2, 0}, {1, 1}}};
  EXPECT_EQ(boxes(shape, {2, 9}), expected);
}

TEST(Boxes, of_whole_slabs_are_one) {
  EXPECT_EQ(boxes(Shape{5, 4}, {4, 16}), (std::vector<Box>{{{1, 0}, {3, 4}}}));
  EXPECT_EQ(boxes(Shape{2, 3, 4}, {0, 24}), (std::vector<Box>{{{0, 0, 0}, {2, 3, 4}}}));
  EXPECT_EQ(boxes(Shape{2, 3, 4}, {4, 12}), (std::vector<Box>{{{0, 1, 0}, {1, 2, 4}}}));
}

TEST(Boxes, reach_the_most_possible) {
  EXPECT_EQ(boxes(Shape{3, 3, 3}, {1, 26}).size(), 5u);
  EXPECT_EQ(boxes(Shape{3, 3, 3, 3}, {1, 80}).size(), 7u);
}

TEST(Boxes, of_a_scalar_are_one_of_no_dims) {
  EXPECT_EQ(boxes(Shape{}, {0, 1}), (std::vector<Box>{Box{}}));
  EXPECT_TRUE(boxes(Shape{}, {0, 0}).empty());
  EXPECT_EQ(flat_interval(Shape{}, Box{}), (Interval{0, 1}));
}

TEST(Boxes, of_nothing_are_none) {
  EXPECT_TRUE(boxes(Shape{3, 4}, {5, 5}).empty());
  EXPECT_TRUE(boxes(Shape{3, 4}, {7, 5}).empty());
  EXPECT_TRUE(boxes(Shape{3, 0, 4}, {0, 0}).empty());
  EXPECT_TRUE(boxes(Shape{0}, {}).empty());
}

TEST(Boxes, cover_every_interval_of_small_shapes) {
  const std::vector<Shape> shapes{{1},       {5},       {1, 1, 1},    {3, 4},       {4, 1},      {1, 5},
                                  {2, 3, 4}, {3, 1, 2}, {2, 2, 2, 2}, {1, 3, 1, 3}, {2, 1, 3, 2}};
  for (const Shape& shape : shapes) {
    const Index numel = checked_product(shape);
    for (Index begin = 0; begin <= numel; ++begin) {
      for (Index end = begin; end <= numel; ++end) expect_exact_cover(shape, {begin, end});
    }
  }
}

TEST(Boxes, cover_random_intervals_of_random_shapes) {
  constexpr std::uint64_t kSeed = 20260131;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  Seeded random(kSeed);
  for (int trial = 0; trial < 2000; ++trial) {
    Shape shape(static_cast<std::size_t>(random.between(0, 4)));
    for (Index& size : shape) size = random.one_in(20) ? 0 : random.between(1, 7);
    const Index numel = checked_product(shape);
    const Index begin = random.between(0, numel);
    expect_exact_cover(shape, {begin, random.between(begin, numel)});
  }
}

TEST(Boxes, refuse_intervals_outside_the_tensor) {
  EXPECT_INVALID(boxes(Shape{3, 4}, {0, 13}), "12 elements, but got [0, 13)");
  EXPECT_INVALID(boxes(Shape{3, 4}, {-1, 3}), "[-1, 3)");
  EXPECT_INVALID(boxes(Shape{3, -4}, {0, 1}), "got -4");
}

TEST(Intersect, keeps_the_elements_that_both_boxes_have) {
  constexpr std::uint64_t kSeed = 7;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  Seeded random(kSeed);
  for (int trial = 0; trial < 1000; ++trial) {
    const Shape shape{random.between(1, 5), random.between(1, 5), random.between(1, 5)};
    const auto random_box = [&] {
      Box box;
      for (Index size : shape) {
        box.offset.push_back(random.between(0, size - 1));
        box.size.push_back(random.between(1, size - box.offset.back()));
      }
      return box;
    };
    const Box a = random_box();
    const Box b = random_box();
    std::vector<Index> common;
    const std::vector<Index> in_b = positions(shape, b);
    for (Index position : positions(shape, a)) {
      if (std::find(in_b.begin(), in_b.end(), position) != in_b.end()) common.push_back(position);
    }
    const std::optional<Box> result = intersect(a, b);
    ASSERT_EQ(result.has_value(), !common.empty()) << "trial " << trial;
    if (result) {
      EXPECT_EQ(positions(shape, *result), common) << "trial " << trial;
    }
    EXPECT_EQ(intersect(b, a), result);
  }
}

TEST(Intersect, of_scalars_is_the_scalar) {
  EXPECT_EQ(intersect(Box{}, Box{}), Box{});
}

TEST(Intersect, refuses_boxes_of_unequal_rank) {
  EXPECT_INVALID(intersect(Box{{0}, {1}}, Box{{0, 0}, {1, 1}}), "equal rank");
  EXPECT_INVALID(intersect(Box{{0}, {1, 1}}, Box{{0}, {1}}), "equal rank");
}

TEST(FlatInterval, accepts_exactly_the_contiguous_boxes) {
  const Shape shape{3, 2, 3};
  for (Index i = 0; i < 3; ++i) {
    for (Index j = 0; j < 2; ++j) {
      for (Index k = 0; k < 3; ++k) {
        for (Index size_i = 1; size_i <= 3 - i; ++size_i) {
          for (Index size_j = 1; size_j <= 2 - j; ++size_j) {
            for (Index size_k = 1; size_k <= 3 - k; ++size_k) {
              const Box box{{i, j, k}, {size_i, size_j, size_k}};
              const std::vector<Index> at = positions(shape, box);
              const bool is_contiguous = at.back() - at.front() + 1 == box.numel();
              if (is_contiguous) {
                EXPECT_EQ(flat_interval(shape, box), (Interval{at.front(), at.back() + 1}));
              } else {
                EXPECT_INVALID(flat_interval(shape, box), "contiguous");
              }
            }
          }
        }
      }
    }
  }
}

TEST(FlatInterval, of_an_empty_box_is_empty) {
  EXPECT_EQ(flat_interval(Shape{3, 4}, Box{{1, 0}, {0, 4}}), Interval{});
  EXPECT_EQ(flat_interval(Shape{3, 0}, Box{{0, 0}, {3, 0}}), Interval{});
}

TEST(FlatInterval, refuses_boxes_that_do_not_fit_the_shape) {
  EXPECT_INVALID(flat_interval(Shape{3, 4}, Box{{0}, {3}}), "a box of 2 dims");
  EXPECT_INVALID(flat_interval(Shape{3, 4}, Box{{1, 0}, {3, 4}}), "within the shape [3, 4]");
  EXPECT_INVALID(flat_interval(Shape{3, 4}, Box{{-1, 0}, {1, 4}}), "within the shape");
  EXPECT_INVALID(flat_interval(Shape{3, 4}, Box{{0, 0}, {1, -4}}), "within the shape");
}

TEST(Interval, knows_its_size_and_members) {
  constexpr Interval interval{3, 7};
  EXPECT_EQ(interval.size(), 4);
  EXPECT_TRUE(interval.contains(3));
  EXPECT_FALSE(interval.contains(7));
  EXPECT_EQ(interval.shifted(-3), (Interval{0, 4}));
  EXPECT_EQ((Interval{7, 3}).size(), 0);
  EXPECT_TRUE((Interval{7, 3}).empty());
  EXPECT_EQ(intersect(interval, {6, 9}), (Interval{6, 7}));
  EXPECT_EQ(intersect(interval, {7, 9}), Interval{});
  EXPECT_EQ(intersect(interval, {0, 3}), Interval{});
}

}  // namespace
}  // namespace ragged::layout
