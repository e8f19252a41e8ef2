#include "ragged/base/error.h"

#include <type_traits>

#include "tests/support/expect_error.h"

namespace ragged {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StrEq;
using ::testing::ThrowsMessage;

TEST(Error, kinds_share_one_base_and_are_apart) {
  static_assert(std::is_base_of_v<std::runtime_error, Error>);
  static_assert(std::is_base_of_v<Error, InvalidArgument>);
  static_assert(std::is_base_of_v<Error, CommError>);
  static_assert(std::is_base_of_v<Error, CheckpointError>);
  static_assert(std::is_base_of_v<Error, InternalError>);
  static_assert(!std::is_base_of_v<InvalidArgument, InternalError>);
}

TEST(Error, check_passes_in_silence) {
  int evaluated = 0;
  const auto count = [&] { return ++evaluated; };
  RAGGED_CHECK(true, "never formatted {}", count());
  RAGGED_ASSERT(true, "never formatted {}", count());
  EXPECT_EQ(evaluated, 0);
}

TEST(Error, check_formats_its_message) {
  EXPECT_THAT(
      [] { RAGGED_CHECK(1 > 2, "[op] Expected {}, but got {} (param '{}').", 2, 1, "wq"); },
      ThrowsMessage<InvalidArgument>(StrEq("[op] Expected 2, but got 1 (param 'wq').")));
}

TEST(Error, assert_says_where_and_what_to_do) {
  EXPECT_THAT(
      [] { RAGGED_ASSERT(false, "broken {}", 7); },
      ThrowsMessage<InternalError>(AllOf(HasSubstr("broken 7 (at error_test.cpp:"), HasSubstr("please report it"))));
}

TEST(Error, check_binds_as_one_statement) {
  const auto check_in_else = [](bool first, bool second) {
    if (first)
      RAGGED_CHECK(second, "second");
    else
      RAGGED_CHECK(false, "first");
  };
  EXPECT_NO_THROW(check_in_else(true, true));
  EXPECT_INVALID(check_in_else(true, false), "second");
  EXPECT_INVALID(check_in_else(false, true), "first");
}

}  // namespace
}  // namespace ragged
