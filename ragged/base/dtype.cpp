#include "ragged/base/dtype.h"

#include <array>
#include <string>

namespace ragged {
namespace {

struct Entry {
  DType dtype;
  Index bytes;
  std::string_view name;
};

constexpr std::array<Entry, 7> kEntries{{
    {DType::kFloat64, 8, "fp64"},
    {DType::kFloat32, 4, "fp32"},
    {DType::kBFloat16, 2, "bf16"},
    {DType::kFloat16, 2, "fp16"},
    {DType::kFloat8E4M3, 1, "fp8_e4m3"},
    {DType::kFloat8E5M2, 1, "fp8_e5m2"},
    {DType::kUInt8, 1, "uint8"},
}};

const Entry& entry(DType dtype) {
  for (const Entry& e : kEntries) {
    if (e.dtype == dtype) return e;
  }
  detail::throw_internal_error(__FILE__, __LINE__, "unknown dtype");
}

}  // namespace

Index item_size(DType dtype) {
  return entry(dtype).bytes;
}

std::string_view name(DType dtype) {
  return entry(dtype).name;
}

DType parse_dtype(std::string_view text) {
  std::string known;
  for (const Entry& e : kEntries) {
    if (e.name == text) return e.dtype;
    known += (known.empty() ? "" : ", ");
    known += e.name;
  }
  RAGGED_CHECK(false, "[dtype] Expected one of {}, but got '{}'.", known, text);
  return DType::kFloat32;
}

}  // namespace ragged
