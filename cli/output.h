// Where commands write: the terminal, and files that are there whole or not at all.
#pragma once

#include <string>
#include <string_view>

namespace ragged::cli {

void print(std::string_view text);

/// Throws InvalidArgument where it can't.
void write_file(const std::string& path, std::string_view text);

}  // namespace ragged::cli
