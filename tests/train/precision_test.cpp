#include "ragged/train/precision.h"

#include <gtest/gtest.h>

#include "ragged/base/error.h"

namespace ragged::train {
namespace {

TEST(Precision, auto_follows_the_hardware_and_says_why) {
  const ComputeDtype plain = choose_param_dtype("auto", c10::kCPU, "flags : avx2 avx512f");
  EXPECT_EQ(plain.dtype, at::kFloat);
  EXPECT_NE(plain.reason.find("no bf16"), std::string::npos);
  const ComputeDtype amx = choose_param_dtype("auto", c10::kCPU, "flags : avx512_bf16 amx_bf16");
  EXPECT_EQ(amx.dtype, at::kBFloat16);
  EXPECT_NE(amx.reason.find("amx_bf16"), std::string::npos);
  EXPECT_EQ(choose_param_dtype("auto", c10::kCPU, "avx512_bf16").dtype, at::kBFloat16);
  EXPECT_EQ(choose_param_dtype("auto", c10::kCUDA, "").dtype, at::kBFloat16);
}

TEST(Precision, what_is_configured_wins) {
  EXPECT_EQ(choose_param_dtype("fp32", c10::kCUDA, "amx_bf16").dtype, at::kFloat);
  EXPECT_EQ(choose_param_dtype("bf16", c10::kCPU, "").dtype, at::kBFloat16);
  EXPECT_THROW(parse_scalar_type("fp8"), InvalidArgument);
}

}  // namespace
}  // namespace ragged::train
