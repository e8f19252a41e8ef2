// Element types as far as layouts, plans and forecasts need them: a name and a size.
// The mapping to torch's scalar types is in ragged/comm/scalar_type.h.
#pragma once

#include <string_view>

#include "ragged/base/math.h"

namespace ragged {

enum class DType { kFloat64, kFloat32, kBFloat16, kFloat16, kFloat8E4M3, kFloat8E5M2, kUInt8 };

/// Bytes of one element.
Index item_size(DType dtype);

/// Short name as in config files: "fp64", "fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "uint8".
std::string_view name(DType dtype);

/// Inverse of name(); throws InvalidArgument that lists the names.
DType parse_dtype(std::string_view text);

}  // namespace ragged
