// The slow, obvious 8-bit AdamW: whole matrices, a tile at a time, nearest entries by looking at all of them. Written
// from the formulas in the documentation, sharing nothing with ragged/optim but AdamW's twin for the constants.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "ragged/base/math.h"
#include "tests/optim/adamw_twin.h"

namespace ragged::test {

/// The published maps: seven decades of interval midpoints.
std::array<float, 256> published_map(bool is_signed);
/// Nearest entry, ties to the lower index.
int nearest_entry(const std::array<float, 256>& map, float value);

struct TwinTileOptions {
  bool dynamic = false;
  bool guards = true;
};

/// A parameter of at least two dims as a whole.
struct TwinTiled {
  std::vector<Index> shape;
  TwinTileOptions options;
  std::vector<float> value;
  std::vector<std::uint8_t> first_codes, second_codes;
  std::vector<float> first_scales, second_scales;  // [matrices, ceil(rows / 32), ceil(columns / 32)]
  int step = 0;
  Index not_finite = 0;

  TwinTiled(std::vector<Index> global_shape, std::vector<float> initial, TwinTileOptions tile_options = {});
  void update(const TwinOptions& adamw, const std::vector<float>& grad, bool decays = true);

  float first(std::size_t i, float scale) const;  // decoded
  float second(std::size_t i, float scale) const;

 private:
  void update_tile(
      const std::vector<std::size_t>& elements, float& first_scale, float& second_scale, const TwinOptions& adamw,
      const std::vector<float>& grad, bool decays);
};

}  // namespace ragged::test
