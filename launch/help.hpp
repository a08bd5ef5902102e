// SPDX-License-Identifier: Apache-2.0
// --help and --version, from the tables.
#pragma once

#include <string>

#include "launch/commands.hpp"
#include "ops/op_table.hpp"

namespace ringattn {

std::string program_help();
// The flags that all ops share and the list of ops; with `op`, the tensors and flags of that op.
std::string command_help(const CommandRow& command, const OpEntry* op = nullptr);
std::string version_line();  // "ringattn 0.2.0 (git 0123456789ab, GNU 12.2.0, Release)"

}  // namespace ringattn
