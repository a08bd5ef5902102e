// SPDX-License-Identifier: Apache-2.0
// Counts the comparisons that a test makes. GoogleTest does not count assertions that hold, so a test whose loop has no
// iterations looks as if it had passed. Code that compares results counts the comparison here, and fixtures check that
// there was one.
#pragma once

#include <cstdint>

namespace ringattn::testing {

namespace internal {
inline std::int64_t checks = 0;
}

// Call this together with an assertion about a computed result.
inline void count_check() { ++internal::checks; }

// Checks in the whole program so far.
inline std::int64_t checks_made() { return internal::checks; }

}  // namespace ringattn::testing
