// SPDX-License-Identifier: Apache-2.0
// What an op and a model's config say in place of flags that nobody gave.
#pragma once

#include "launch/config.hpp"

namespace ringattn {

// Fills in the defaults of --op, and what --model-config FILE says, of which the op follows where none was given. What
// a user gave in any layer stays. Throws kUsage for settings that contradict each other, and what ModelConfig throws.
void fill_from_model(Config& config);

}  // namespace ringattn
