// SPDX-License-Identifier: Apache-2.0
// Runs programs as a user does and keeps what they print.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace ringattn::testing {

struct Finished {
  int code = 0;  // exit code, or 128 + the signal that ended it
  std::string out;
  std::string err;
};

// Runs `words` (the first is the program, searched in PATH) and waits for its end. The environment is this process's
// without RINGATTN_ variables, with `variables` on top.
Finished run_program(const std::vector<std::string>& words,
                     const std::vector<std::pair<std::string, std::string>>& variables = {});

}  // namespace ringattn::testing
