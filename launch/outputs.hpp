// SPDX-License-Identifier: Apache-2.0
// Checks the files that a job will write before it starts, so that hours of work are not lost to a failure at the end,
// and no result overwrites its own input.
#pragma once

#include <string>

#include "launch/commands.hpp"

namespace ringattn {

// Throws kUsage if a file to be written is also read, or is written twice, even if its path is spelled differently.
void check_distinct_files(const JobOptions& options);

// Throws kFile if an output exists and may not be replaced (`replace`), or can't be created.
using OutputCheck = void (*)(const std::string& path, bool replace);

// Throws kFile if a file to be written exists and may not be replaced, or can't be created. The library checks
// --output: with `check_output` or, if it is null, as a safetensors file.
void check_outputs(const Invocation& invocation, OutputCheck check_output = nullptr);

}  // namespace ringattn
