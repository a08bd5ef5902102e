// SPDX-License-Identifier: Apache-2.0
// What the environment says to tests.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string_view>

namespace ringattn::testing {

// RINGATTN_TEST_LONG=1: the long variants too.
inline bool long_tests() {
  const char* value = std::getenv("RINGATTN_TEST_LONG");
  return value != nullptr && std::string_view(value) == "1";
}

// RINGATTN_TEST_SEED=N: replay this one case of a property test instead of all of them.
inline std::optional<std::uint64_t> replayed_seed() {
  const char* value = std::getenv("RINGATTN_TEST_SEED");
  if (value == nullptr) return std::nullopt;
  return std::strtoull(value, nullptr, 10);
}

}  // namespace ringattn::testing
