// Compiled with -ffp-contract=off, like what it is the twin of.
#include "tests/optim/adamw8bit_twin.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ragged::test {
namespace {

constexpr Index kTile = 32;

float square_or_fourth(float ratio, bool fourth) {
  return fourth ? (ratio * ratio) * (ratio * ratio) : ratio * std::fabs(ratio);
}

}  // namespace

std::array<float, 256> published_map(bool is_signed) {
  std::vector<float> entries{0.0F, 1.0F};
  for (int decade = 0; decade < 7; ++decade) {
    const int parts = (is_signed ? 1 : 2) << decade;
    std::vector<float> edges;
    for (int i = 0; i < parts; ++i) edges.push_back(static_cast<float>(0.1 + 0.9 / parts * i));
    edges.push_back(1.0F);
    for (int i = 0; i < parts; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const float middle = (edges[at] + edges[at + 1]) / 2.0F * static_cast<float>(std::pow(10.0, decade - 6));
      entries.push_back(middle);
      if (is_signed) entries.push_back(-middle);
    }
  }
  std::sort(entries.begin(), entries.end());
  std::array<float, 256> map{};
  std::copy(entries.begin(), entries.end(), map.begin());
  return map;
}

int nearest_entry(const std::array<float, 256>& map, float value) {
  int best = 0;
  for (int i = 1; i < 256; ++i) {
    const auto distance = [&](int k) { return std::fabs(double{value} - double{map[static_cast<std::size_t>(k)]}); };
    if (distance(i) < distance(best)) best = i;
  }
  return best;
}

TwinTiled::TwinTiled(std::vector<Index> global_shape, std::vector<float> initial, TwinTileOptions tile_options)
    : shape(std::move(global_shape)), options(tile_options), value(std::move(initial)) {
  const Index rows = shape[shape.size() - 2];
  const Index columns = shape.back();
  Index matrices = 1;
  for (std::size_t d = 0; d + 2 < shape.size(); ++d) matrices *= shape[d];
  const auto tiles =
      static_cast<std::size_t>(matrices * ((rows + kTile - 1) / kTile) * ((columns + kTile - 1) / kTile));
  first_codes.assign(value.size(), options.dynamic ? 127 : 0);
  second_codes.assign(value.size(), 0);
  first_scales.assign(tiles, 0.0F);
  second_scales.assign(tiles, 0.0F);
}

float TwinTiled::first(std::size_t i, float scale) const {
  static const std::array<float, 256> map = published_map(true);
  if (options.dynamic) return map[first_codes[i]] * scale;
  const int k = first_codes[i] < 128 ? first_codes[i] : first_codes[i] - 256;
  return scale * square_or_fourth(static_cast<float>(k) * (1.0F / 127.0F), false);
}

float TwinTiled::second(std::size_t i, float scale) const {
  static const std::array<float, 256> map = published_map(false);
  if (options.dynamic) return map[second_codes[i]] * scale;
  return scale * square_or_fourth(static_cast<float>(second_codes[i]) * (1.0F / 255.0F), true);
}

void TwinTiled::update(const TwinOptions& adamw, const std::vector<float>& grad, bool decays) {
  ++step;
  const Index rows = shape[shape.size() - 2];
  const Index columns = shape.back();
  std::size_t tile = 0;
  for (Index top = 0; top < static_cast<Index>(value.size()) / std::max<Index>(columns, 1);) {
    const Index matrix_end = (top / rows + 1) * rows;
    const Index bottom = std::min(top + kTile, matrix_end);
    for (Index left = 0; left < columns; left += kTile, ++tile) {
      std::vector<std::size_t> elements;
      for (Index r = top; r < bottom; ++r) {
        for (Index c = left; c < std::min(left + kTile, columns); ++c) {
          elements.push_back(static_cast<std::size_t>(r * columns + c));
        }
      }
      update_tile(elements, first_scales[tile], second_scales[tile], adamw, grad, decays);
    }
    top = bottom;
  }
}

void TwinTiled::update_tile(
    const std::vector<std::size_t>& elements, float& first_scale, float& second_scale, const TwinOptions& adamw,
    const std::vector<float>& grad, bool decays) {
  static const std::array<float, 256> signed_map = published_map(true);
  static const std::array<float, 256> unsigned_map = published_map(false);
  std::vector<float> m;
  std::vector<float> v;
  for (const std::size_t i : elements) {
    TwinParameter one({value[i]}, decays);
    one.step = step - 1;
    one.exp_avg_sq = {second(i, second_scale)};
    one.exp_avg = {first(i, first_scale)};
    if (options.guards && one.exp_avg_sq[0] == 0.0F) one.exp_avg = {0.0F};
    if (std::isfinite(grad[i])) {
      one.update(adamw, {std::clamp(grad[i], -1e19F, 1e19F)});
      value[i] = one.value[0];
    } else {
      value[i] = std::numeric_limits<float>::quiet_NaN();
      ++not_finite;
    }
    m.push_back(one.exp_avg[0]);
    v.push_back(one.exp_avg_sq[0]);
  }
  first_scale = second_scale = 0.0F;
  for (std::size_t e = 0; e < elements.size(); ++e) {
    first_scale = std::max(first_scale, std::fabs(m[e]));
    second_scale = std::max(second_scale, v[e]);
  }
  if (first_scale < std::numeric_limits<float>::min()) first_scale = 0.0F;
  if (second_scale < std::numeric_limits<float>::min()) second_scale = 0.0F;
  for (std::size_t e = 0; e < elements.size(); ++e) {
    const std::size_t i = elements[e];
    int first_code = options.dynamic ? 127 : 0;
    int second_code = 0;
    if (first_scale > 0.0F) {
      const float share = m[e] * (1.0F / first_scale);
      const auto size = static_cast<int>(std::nearbyint(std::sqrt(std::fabs(share)) * 127.0F));
      first_code = options.dynamic ? nearest_entry(signed_map, share) : m[e] < 0.0F ? -size : size;
    }
    if (second_scale > 0.0F) {
      const float root = std::sqrt(v[e]) * (1.0F / std::sqrt(second_scale));
      second_code = options.dynamic ? nearest_entry(unsigned_map, v[e] * (1.0F / second_scale))
                                    : static_cast<int>(std::nearbyint(std::sqrt(root) * 255.0F));
      if (options.guards && v[e] > 0.0F) second_code = std::max(second_code, 1);
    }
    first_codes[i] = static_cast<std::uint8_t>(first_code);
    second_codes[i] = static_cast<std::uint8_t>(second_code);
  }
}

}  // namespace ragged::test
