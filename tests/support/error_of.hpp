// SPDX-License-Identifier: Apache-2.0
// The Error that a call throws, for tests that look at it.
#pragma once

#include <gtest/gtest.h>

#include "base/error.hpp"

namespace ringattn::testing {

// `call` must throw one; the test fails where it doesn't.
template <typename Call>
Error error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorCode::kInternal, "");
}

}  // namespace ringattn::testing
