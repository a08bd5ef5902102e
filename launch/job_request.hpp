// SPDX-License-Identifier: Apache-2.0
// Converts a configuration to the library's options, and checks its flags against each other.
#pragma once

#include "launch/config.hpp"
#include "ops/op_table.hpp"

namespace ringattn {

// Checks the input's flags against each other. Throws kUsage. `require_source`: one of --input and --synthetic must be
// given; otherwise the shape flags are enough.
void check_source(const Config& config, bool require_source);

// Metadata of the settings that decide an op's result, not of where and how it is computed.
FileMetadata deciding_values(const Config& config, const OpEntry& op);

// The machine model of --machine, slowed down to the pace that the environment sets. Throws kFile.
MachineModel machine_model(const Config& config);

// Throws kUsage and kFile.
Options library_options(const Config& config);

}  // namespace ringattn
