// SPDX-License-Identifier: Apache-2.0
// What every kernel checks before it folds a task.
#pragma once

#include "kernels/attention.hpp"

namespace ringattn {

// Throws kInternal where the task's views, pages, pieces, state or sinks don't fit the spec that the kernel was made
// for, or its tiles of `key_tile` keys.
void check_attention_task(const AttentionSpec& spec, int key_tile, const AttentionTask& task);

}  // namespace ringattn
