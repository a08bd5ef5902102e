// SPDX-License-Identifier: Apache-2.0
// The worlds that the conformance suite (conformance_test.cpp, failures_test.cpp) runs in. Each program that links the
// suite brings its own table.
#pragma once

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "comm/transport.hpp"

namespace ringattn::testing {

struct WorldCase {
  std::string name;  // of the test
  // Runs the function on every rank of a fresh world and returns the sum of what all ranks returned. Rethrows.
  std::function<int(const std::function<int(Transport&)>&)> run;
  MemoryKind memory = MemoryKind::kHost;
  std::string needs{};  // what it would take to run it here; empty: nothing
};

inline void PrintTo(const WorldCase& world, std::ostream* out) { *out << world.name; }

std::vector<WorldCase> world_cases();

}  // namespace ringattn::testing
