// base's torch-free dtypes and torch's scalar types.
#pragma once

#include <c10/core/ScalarType.h>

#include "ragged/base/dtype.h"

namespace ragged::comm {

at::ScalarType to_scalar_type(DType dtype);
/// Throws InvalidArgument for a scalar type that RaggedFSDP doesn't shard (complex, bool, integers but uint8).
DType to_dtype(at::ScalarType type);

}  // namespace ragged::comm
