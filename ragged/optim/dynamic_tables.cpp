// The maps of the dynamic format, and the cells that find their nearest entry.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "ragged/base/error.h"
#include "ragged/optim/tile_codes.h"

namespace ragged::optim {
namespace {

constexpr int kDecades = 7;

// Zero, one, and in decade i the midpoints of `first_count` * 2^i equal parts of [0.1, 1], times 10^(i - 6). In fp32 in
// the order of operations that gives the bits of the published maps. Ascending.
std::vector<float> magnitudes(int first_count) {
  std::vector<float> values{0.0F};
  for (int decade = 0; decade < kDecades; ++decade) {
    const int parts = first_count << decade;
    const auto border = [parts](int i) { return static_cast<float>(i == parts ? 1.0 : 0.1 + i * (0.9 / parts)); };
    const auto scale = static_cast<float>(std::pow(10.0, decade - (kDecades - 1)));
    for (int i = 0; i < parts; ++i) values.push_back(scale * ((border(i) + border(i + 1)) / 2.0F));
  }
  values.push_back(1.0F);
  return values;
}

// The largest float that is nearer to `low` than to `high`; `tie_is_low` says whose the middle is.
float border_between(float low, float high, bool tie_is_low) {
  const double middle = (static_cast<double>(low) + static_cast<double>(high)) / 2.0;  // exact
  auto border = static_cast<float>(middle);
  if (static_cast<double>(border) > middle) border = std::nextafter(border, 0.0F);
  if (static_cast<double>(border) == middle && !tie_is_low) border = std::nextafter(border, 0.0F);
  return border;
}

// Between the first `count` values; none above the last.
void fill_borders(const std::vector<float>& values, std::size_t count, bool tie_is_low, float* borders) {
  for (std::size_t k = 0; k + 1 < count; ++k) borders[k] = border_between(values[k], values[k + 1], tie_is_low);
}

// A cell's entry is that of its smallest magnitude, or one lower where a border is exactly there.
void fill_cells(const std::vector<float>& values, std::int32_t (&cells)[DynamicTables::kCells]) {
  const auto start = [](int cell) {
    const auto bits = static_cast<std::uint32_t>(cell) << (23 - DynamicTables::kMantissaBits);
    return cell == 0 ? 0.0 : static_cast<double>(float_of(DynamicTables::kFirstBits + bits));
  };
  const auto middle = [&](std::size_t k) {
    return k + 1 < values.size() ? (static_cast<double>(values[k]) + static_cast<double>(values[k + 1])) / 2.0
                                 : std::numeric_limits<double>::infinity();
  };
  std::size_t k = 0;
  for (int cell = 0; cell < DynamicTables::kCells; ++cell) {
    while (middle(k) < start(cell)) ++k;
    cells[cell] = static_cast<std::int32_t>(k);
    const bool last = cell + 1 == DynamicTables::kCells;
    RAGGED_ASSERT(last || middle(k + 1) >= start(cell + 1), "two borders in cell {} of a dynamic map", cell);
  }
}

DynamicTables make_tables() {
  DynamicTables tables{};
  const std::vector<float> first = magnitudes(1);
  const std::vector<float> second = magnitudes(2);
  RAGGED_ASSERT(first.size() == 129 && second.size() == 256, "maps of {} and {}", first.size(), second.size());
  std::copy(second.begin(), second.end(), tables.second);
  for (std::size_t k = 0; k < first.size(); ++k) {
    tables.first[127 + k] = first[k];
    if (k <= 127) tables.first[127 - k] = -first[k];
  }
  tables.first[127] = 0.0F;
  std::fill(std::begin(tables.first_borders), std::end(tables.first_borders), std::numeric_limits<float>::infinity());
  std::fill(std::begin(tables.second_borders), std::end(tables.second_borders), std::numeric_limits<float>::infinity());
  fill_borders(first, first.size(), true, tables.first_borders);
  fill_borders(first, first.size() - 1, false, tables.first_borders + DynamicTables::kNegativeBorders);
  fill_borders(second, second.size(), true, tables.second_borders);
  fill_cells(first, tables.first_cells);
  fill_cells(second, tables.second_cells);
  return tables;
}

}  // namespace

const DynamicTables& dynamic_tables() {
  static const DynamicTables tables = make_tables();
  return tables;
}

}  // namespace ragged::optim
