#include "ragged/base/error.h"

#include <cstring>

namespace ragged::detail {

void throw_invalid_argument(std::string message) {
  throw InvalidArgument(message);
}

void throw_internal_error(const char* file, int line, std::string message) {
  const char* slash = std::strrchr(file, '/');
  throw InternalError(fmt::format(
      "{} (at {}:{}). This is a bug in RaggedFSDP: please report it.", message, slash ? slash + 1 : file, line));
}

}  // namespace ragged::detail
