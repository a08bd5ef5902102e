// SPDX-License-Identifier: Apache-2.0
// Lines on stderr about input that is legal and most often not what was meant. --quiet does not silence them.
#pragma once

#include "launch/config.hpp"
#include "ops/common/job_input.hpp"

namespace ringattn {

// Says that the config.json of --model-config has no model_type, and how it is read instead. To be called by one rank.
void note_assumed_model(const Config& config);

// Warns where a file has more queries than keys, so that a causal mask leaves queries without a key: most often its
// heads come first and were read as tokens. To be called by one rank.
void warn_of_unseen_keys(const Config& config, const JobInput& input);

}  // namespace ringattn
