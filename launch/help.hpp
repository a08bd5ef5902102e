// SPDX-License-Identifier: Apache-2.0
// --help and --version, from the tables.
#pragma once

#include <string>

#include "launch/commands.hpp"

namespace ringattn {

std::string program_help();
std::string command_help(const CommandRow& command);
std::string version_line();  // "ringattn 0.2.0 (git 0123456789ab, GNU 12.2.0, Release)"

}  // namespace ringattn
