// Elements of stored tensors as fp32 and back: what weights of others come in and go out as. No torch.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "ragged/checkpoint/checksum.h"

namespace ragged::checkpoint {

/// Whether the two functions below know this dtype: "F32", "BF16", "F16".
bool has_float_elements(std::string_view dtype);

/// Exact. `bytes` are values.size() little-endian elements of `dtype`; throws InvalidArgument for any other.
void decode_elements(std::string_view dtype, Bytes bytes, std::span<float> values);

/// Rounds to nearest, ties to even; beyond the largest finite value lies infinity. A NaN stays one. Values that came
/// from this dtype get their bits back.
void encode_elements(std::string_view dtype, std::span<const float> values, std::span<std::byte> bytes);

}  // namespace ragged::checkpoint
