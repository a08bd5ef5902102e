// SPDX-License-Identifier: Apache-2.0
// Scans, as a configuration means them, and what every subcommand says of one.
#pragma once

#include <cstdint>

#include "launch/config.hpp"
#include "launch/report.hpp"
#include "launch/screen.hpp"
#include "ops/ssm/ssm.hpp"
#include "ops/ssm/ssm_input.hpp"

namespace ringattn {

// Whether the input file, or --op for synthetic input, is that of an SSM layer or its convolution. Checks the input's
// flags against each other. Throws kUsage, and kFile for a file that holds no job. `require_source`: as
// input_request().
bool holds_ssm(const Config& config, bool require_source);

// The input, open; of synthetic input, sequences of `seq` tokens. Throws kUsage and kFile.
SsmInput open_ssm(const Config& config, std::int64_t seq);
SsmInput open_ssm(const Config& config);

}  // namespace ringattn
