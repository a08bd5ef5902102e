// SPDX-License-Identifier: Apache-2.0
// An op that only tests have: out = temperature · left + gate · right.
#pragma once

#include "ops/jobs/op_entry.hpp"

namespace ringattn::testing {

extern const OpEntry kToyOp;

}  // namespace ringattn::testing
