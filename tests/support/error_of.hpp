// SPDX-License-Identifier: Apache-2.0
// The Error that a call throws, for tests that check it.
#pragma once

#include <gtest/gtest.h>

#include "base/error.hpp"

namespace ringattn::testing {

// `call` must throw an Error; otherwise the test fails.
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
