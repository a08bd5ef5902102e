// SPDX-License-Identifier: Apache-2.0
// From the command line to the exit code.
#pragma once

#include <string>
#include <vector>

namespace ringattn {

// `arguments` starts with the program's name. At most one process of the job prints one message, and all return the
// same code, whatever happens.
int run_program(const std::vector<std::string>& arguments);

}  // namespace ringattn
