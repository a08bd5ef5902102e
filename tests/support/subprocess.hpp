// SPDX-License-Identifier: Apache-2.0
// Runs programs as a user does and keeps what they print.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace ringattn::testing {

struct Finished {
  int code = 0;  // exit code, or 128 + the signal that ended it
  std::string out;
  std::string err;
  std::int64_t peak_bytes = 0;  // its largest resident memory, or what this process had when it was started
  double cpu_seconds = 0.0;
};

// Runs `words` (the first is the program, searched in PATH) and waits for its end. The environment is this process's
// without RINGATTN_ variables, with `variables` on top.
Finished run_program(const std::vector<std::string>& words,
                     const std::vector<std::pair<std::string, std::string>>& variables = {});

}  // namespace ringattn::testing
