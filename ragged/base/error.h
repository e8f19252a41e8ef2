// The one error channel: exceptions of four kinds, and the checks that throw them.
// Not a status type and not a logger; the library never aborts or exits.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include <fmt/core.h>

namespace ragged {

/// Base of everything the library throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A precondition of a public call failed: the caller can fix the call.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// A time-out, a lost peer or a failing backend: the group is unusable, build a new one or restart.
class CommError : public Error {
 public:
  using Error::Error;
};

/// A checkpoint file is missing, damaged or doesn't fit.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

/// An invariant of this library broke: a bug to report.
class InternalError : public Error {
 public:
  using Error::Error;
};

namespace detail {

// Cold and out of line, so that a check costs its caller one compare.
[[noreturn]] void throw_invalid_argument(std::string message);
[[noreturn]] void throw_internal_error(const char* file, int line, std::string message);

}  // namespace detail

}  // namespace ragged

/// Throws InvalidArgument unless `cond` holds. The rest is a fmt format string and its arguments;
/// write it as
/// "[operation] Expected <what>, but got <value> (param 'layers.3.wq', rank 2 of 8). <what to do>".
#define RAGGED_CHECK(cond, ...)                                             \
  do {                                                                      \
    if (!(cond)) [[unlikely]]                                               \
      ::ragged::detail::throw_invalid_argument(::fmt::format(__VA_ARGS__)); \
  } while (false)

/// Throws InternalError unless `cond` holds. Stays on in release builds: keep it cheap.
#define RAGGED_ASSERT(cond, ...)                                                              \
  do {                                                                                        \
    if (!(cond)) [[unlikely]]                                                                 \
      ::ragged::detail::throw_internal_error(__FILE__, __LINE__, ::fmt::format(__VA_ARGS__)); \
  } while (false)
