// The index of a model in several safetensors files ("model.safetensors.index.json"): which tensor lies in which file.
// Text in, values out; no file is touched.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "ragged/base/math.h"

namespace ragged::plan {

/// Tensor -> name of the file beside the index. Throws InvalidArgument that names `source` for bad JSON, no tensors, a
/// tensor that occurs twice, and anything but the plain name of a file: what a stranger wrote must not lead elsewhere.
std::map<std::string, std::string> parse_safetensors_index(std::string_view text, std::string_view source);

/// `total_bytes` of all tensors, as readers of such files expect it beside the map. Throws InvalidArgument for names
/// that aren't UTF-8.
std::string write_safetensors_index(const std::map<std::string, std::string>& files, Index total_bytes);

}  // namespace ragged::plan
