// SPDX-License-Identifier: Apache-2.0
// The files that a job is going to write, checked before it starts: a failure at the end of hours of work, or a result
// written over its own input, would come too late.
#pragma once

#include <string>

#include "launch/commands.hpp"

namespace ringattn {

// Throws kUsage when a file to be written is also read, or written twice, under whatever spelling of its path.
void check_distinct_files(const JobOptions& options);

// Throws kFile where an output exists and may not be replaced (`replace`), or can't be made.
using OutputCheck = void (*)(const std::string& path, bool replace);

// Throws kFile when a file to be written exists and may not be replaced, or can't be made. The library checks --output:
// by `check_output`, or, null, as a safetensors file.
void check_outputs(const Invocation& invocation, OutputCheck check_output = nullptr);

}  // namespace ringattn
