// SPDX-License-Identifier: Apache-2.0
// What a configuration asks for, as the library's options, and checks of its flags against each other.
#pragma once

#include "launch/config.hpp"
#include "ops/op_table.hpp"

namespace ringattn {

// Checks the input's flags against each other. Throws kUsage. `require_source`: one of --input and --synthetic must be
// given; otherwise the shape flags are enough.
void check_source(const Config& config, bool require_source);

// Metadata of what decides the result of an op; where and how it was computed does not.
FileMetadata deciding_values(const Config& config, const OpEntry& op);

// The machine model of --machine, slowed down to the pace that the environment sets. Throws kFile.
MachineModel machine_model(const Config& config);

// Throws kUsage and kFile.
Options library_options(const Config& config);

}  // namespace ringattn
