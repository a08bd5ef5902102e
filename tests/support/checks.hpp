// SPDX-License-Identifier: Apache-2.0
// Counts the comparisons that a test makes. GoogleTest doesn't count assertions that hold, so a test whose loop ran
// over nothing looks like one that passed. What compares results counts itself here, and fixtures ask for the count.
#pragma once

#include <cstdint>

namespace ringattn::testing {

namespace internal {
inline std::int64_t checks = 0;
}

// Call it beside an assertion about a result that was computed.
inline void count_check() { ++internal::checks; }

// Checks in the whole program so far.
inline std::int64_t checks_made() { return internal::checks; }

}  // namespace ringattn::testing
