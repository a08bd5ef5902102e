// SPDX-License-Identifier: Apache-2.0
// Tests have a quick form for every day and, where that leaves something out, a long one: RINGATTN_TEST_LONG=1.
#pragma once

#include <cstdlib>
#include <string_view>

namespace ringattn::testing {

inline bool long_tests() {
  const char* value = std::getenv("RINGATTN_TEST_LONG");
  return value != nullptr && std::string_view(value) == "1";
}

}  // namespace ringattn::testing
