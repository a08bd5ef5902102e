// SPDX-License-Identifier: Apache-2.0
// Lines on stderr about input that is legal and most often not what was meant. --quiet does not silence them.
#pragma once

#include "attention/files/job_input.hpp"
#include "launch/config.hpp"

namespace ringattn {

// Warns where a file has more queries than keys, so that a causal mask leaves queries without a key: most often its
// heads come first and were read as tokens. To be called by one rank.
void warn_of_unseen_keys(const Config& config, const JobInput& input);

}  // namespace ringattn
