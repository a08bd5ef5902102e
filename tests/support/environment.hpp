// SPDX-License-Identifier: Apache-2.0
// Settings of tests in the environment.
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

// Chooses among the cases of nested loops. Without RINGATTN_TEST_LONG it takes every `every`-th case, beginning with
// case `first`. `every` must have no common factor with the length of an inner loop, so that each value of each loop
// occurs.
class CaseChoice {
 public:
  explicit CaseChoice(std::int64_t every, std::int64_t first = 0)
      : every_(long_tests() ? 1 : every), next_(every_ - first % every_) {}
  // Whether the next case is taken.
  bool take() { return next_++ % every_ == 0; }

 private:
  std::int64_t every_;
  std::int64_t next_;
};

// RINGATTN_TEST_SEED=N: replay this one case of a property test instead of all of them.
inline std::optional<std::uint64_t> replayed_seed() {
  const char* value = std::getenv("RINGATTN_TEST_SEED");
  if (value == nullptr) return std::nullopt;
  return std::strtoull(value, nullptr, 10);
}

}  // namespace ringattn::testing
