// SPDX-License-Identifier: Apache-2.0
// Values that an op and a model's config provide for flags that the user did not give.
#pragma once

#include "launch/config.hpp"

namespace ringattn {

// Fills in the defaults of --op, and the values of --model-config FILE, which also determine the op if none was given.
// Values that the user gave in any layer are kept. Throws kUsage for settings that contradict each other, and the
// errors of ModelConfig.
void fill_from_model(Config& config);

}  // namespace ringattn
