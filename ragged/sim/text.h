// Numbers and tables as people read them on a terminal.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ragged/base/math.h"
#include "ragged/base/text.h"

namespace ragged::sim {

/// "57.3 GiB".
std::string bytes_text(double bytes);
/// "12.3 ms".
std::string seconds_text(double seconds);
/// A fraction as a percentage with three digits that say something: "0.0021 %", "5.98 %", "190 %".
std::string percent_text(double fraction);
/// "80GiB", "80G", "1.5TB" or plain bytes. Throws InvalidArgument, with `option`, for anything else.
double parse_bytes(std::string_view text, std::string_view option);

/// Columns that line up: the first to the left, numbers to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> header, std::size_t left_columns = 1)
      : rows_{std::move(header)}, left_columns_(left_columns) {}

  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  /// A line between what is above and what follows.
  void rule() { rules_.push_back(rows_.size()); }
  std::string to_string(bool colour) const;

 private:
  std::vector<std::vector<std::string>> rows_;
  std::vector<std::size_t> rules_;
  std::size_t left_columns_;
};

/// `text` in bold, if `colour`.
std::string bold(std::string_view text, bool colour);

}  // namespace ragged::sim
