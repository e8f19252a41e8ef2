#include "ragged/sim/text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>

#include <fmt/format.h>

namespace ragged::sim {

std::string bytes_text(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  std::size_t unit = 0;
  while (bytes >= 1024.0 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes)
                   : fmt::format("{:.{}f} {}", bytes, bytes < 100 ? 2 : 1, kUnits[unit]);
}

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1.0) return fmt::format("{:.1f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

std::string percent_text(double fraction) {
  const double percent = 100.0 * fraction;
  if (percent == 0.0) return "0 %";
  const double digits = 2.0 - std::floor(std::log10(std::abs(percent)));
  return fmt::format("{:.{}f} %", percent, static_cast<int>(std::clamp(digits, 0.0, 5.0)));
}

double parse_bytes(std::string_view text, std::string_view option) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  double scale = 0;
  if (unit.empty() || unit == "B") scale = 1;
  constexpr std::string_view kPrefixes = "KMGT";
  const auto power = unit.empty() ? kPrefixes.npos : kPrefixes.find(unit[0]);
  const std::string_view rest = unit.substr(std::min<std::size_t>(1, unit.size()));
  if (power != kPrefixes.npos && (rest.empty() || rest == "iB" || rest == "B")) {
    scale = std::pow(rest == "B" ? 1000.0 : 1024.0, static_cast<double>(power) + 1);
  }
  RAGGED_CHECK(
      error == std::errc() && value > 0 && std::isfinite(value) && scale > 0,
      "[{}] Expected a size such as 80GiB, but got '{}'.", option, text);
  return value * scale;
}

std::string bold(std::string_view text, bool colour) {
  return colour ? fmt::format("\x1b[1m{}\x1b[0m", text) : std::string(text);
}

std::string Table::to_string(bool colour) const {
  std::vector<std::size_t> widths;
  for (const std::vector<std::string>& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    if (std::ranges::find(rules_, r) != rules_.end()) {
      std::size_t width = 0;
      for (const std::size_t w : widths) width += w + 2;
      text += std::string(width - 2, '-') + "\n";
    }
    std::string line;
    for (std::size_t c = 0; c < rows_[r].size(); ++c) {
      line += c < left_columns_ ? fmt::format("{:<{}}", rows_[r][c], widths[c])
                                : fmt::format("{:>{}}", rows_[r][c], widths[c]);
      line += "  ";
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += (r == 0 ? bold(line, colour) : line) + "\n";
  }
  return text;
}

}  // namespace ragged::sim
