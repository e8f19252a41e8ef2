#include "ragged/base/dtype.h"

#include "tests/support/expect_error.h"

namespace ragged {
namespace {

constexpr DType kAll[] = {DType::kFloat64,    DType::kFloat32,    DType::kBFloat16, DType::kFloat16,
                          DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kUInt8};

TEST(DType, has_the_size_of_one_element) {
  EXPECT_EQ(item_size(DType::kFloat64), 8);
  EXPECT_EQ(item_size(DType::kFloat32), 4);
  EXPECT_EQ(item_size(DType::kBFloat16), 2);
  EXPECT_EQ(item_size(DType::kFloat16), 2);
  EXPECT_EQ(item_size(DType::kFloat8E4M3), 1);
  EXPECT_EQ(item_size(DType::kFloat8E5M2), 1);
  EXPECT_EQ(item_size(DType::kUInt8), 1);
}

TEST(DType, comes_back_from_its_name) {
  for (DType dtype : kAll) EXPECT_EQ(parse_dtype(name(dtype)), dtype) << name(dtype);
}

TEST(DType, refuses_unknown_names_and_lists_the_known) {
  EXPECT_INVALID(parse_dtype("float33"), "bf16, fp16");
  EXPECT_INVALID(parse_dtype("float33"), "'float33'");
  EXPECT_INVALID(parse_dtype(""), "[dtype]");
  EXPECT_INVALID(parse_dtype("BF16"), "'BF16'");
}

}  // namespace
}  // namespace ragged
