// Small things that every layer with output for people needs: digits, terminals, names that were nearly right.
#pragma once

#include <string>
#include <string_view>

#include "ragged/base/math.h"

namespace ragged {

/// "1,234,567".
std::string grouped(Index value);
/// Insertions, deletions and replacements of one character that turn `a` into `b` (Levenshtein): for suggesting names.
std::size_t edit_distance(std::string_view a, std::string_view b);
/// Standard output is a terminal that shows colours, and nobody asked for none (no-color.org).
bool stdout_has_colour();

}  // namespace ragged
