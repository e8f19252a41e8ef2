// Refused calls in tests: the kind of the exception and a fragment of its text.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ragged/base/error.h"

/// Expects `statement` to throw InvalidArgument with `fragment` in its text.
#define EXPECT_INVALID(statement, fragment)  \
  EXPECT_THAT(                               \
      [&] { static_cast<void>(statement); }, \
      ::testing::ThrowsMessage<::ragged::InvalidArgument>(::testing::HasSubstr(fragment)))
