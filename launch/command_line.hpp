// SPDX-License-Identifier: Apache-2.0
// Arguments as flags and their texts. Values are read elsewhere (config.hpp), the same way for every layer.
#pragma once

#include <string>
#include <vector>

#include "launch/flags.hpp"

namespace ringattn {

struct GivenFlag {
  const FlagRow* row = nullptr;
  std::string text;  // "true" for a switch without a value
};

struct CommandLine {
  bool help = false;
  std::vector<GivenFlag> flags;  // besides --help: only --op
};

// Splits the arguments after a subcommand. Throws kUsage for an unknown flag (with the nearest one), a flag given
// twice, a missing value, or an argument that belongs to no flag.
CommandLine split_command_line(unsigned command, std::string_view command_name,
                               const std::vector<std::string>& arguments);

}  // namespace ringattn
