// SPDX-License-Identifier: Apache-2.0
// Values that an op and a model's config provide for flags that the user did not give.
#pragma once

#include "launch/config.hpp"

namespace ringattn {

// Fills in the defaults of --op, and what --model-config FILE says, of which the op follows where none was given. What
// a user gave in any layer stays. Throws kUsage for settings that contradict each other, and what ModelConfig throws.
void fill_from_model(Config& config);

}  // namespace ringattn
