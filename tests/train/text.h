// A text in memory, as load_text() would give it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include <ATen/ATen.h>

#include "ragged/train/data.h"

namespace ragged::train {

/// The last quarter is held out.
inline TextData text_in_memory(const std::string& text, std::uint64_t fingerprint) {
  const at::Tensor bytes = at::empty({static_cast<Index>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), bytes.mutable_data_ptr<std::uint8_t>());
  const Index cut = bytes.numel() * 3 / 4;
  return {
      .train = bytes.narrow(0, 0, cut).clone(),
      .validation = bytes.narrow(0, cut, bytes.numel() - cut).clone(),
      .folder = "memory",
      .files = 1,
      .fingerprint = fingerprint};
}

}  // namespace ragged::train
