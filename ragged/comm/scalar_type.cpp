#include "ragged/comm/scalar_type.h"

#include <array>
#include <utility>

#include "ragged/base/error.h"

namespace ragged::comm {
namespace {

constexpr std::array<std::pair<DType, at::ScalarType>, 7> kTypes{{
    {DType::kFloat64, at::kDouble},
    {DType::kFloat32, at::kFloat},
    {DType::kBFloat16, at::kBFloat16},
    {DType::kFloat16, at::kHalf},
    {DType::kFloat8E4M3, at::kFloat8_e4m3fn},
    {DType::kFloat8E5M2, at::kFloat8_e5m2},
    {DType::kUInt8, at::kByte},
}};

}  // namespace

at::ScalarType to_scalar_type(DType dtype) {
  for (const auto& [ours, torchs] : kTypes) {
    if (ours == dtype) return torchs;
  }
  RAGGED_ASSERT(false, "dtype without scalar type");
  return at::kFloat;
}

DType to_dtype(at::ScalarType type) {
  for (const auto& [ours, torchs] : kTypes) {
    if (torchs == type) return ours;
  }
  RAGGED_CHECK(false, "[dtype] Expected a floating-point type or uint8, but got {}.", c10::toString(type));
  return DType::kFloat32;
}

}  // namespace ragged::comm
