// SPDX-License-Identifier: Apache-2.0
// Validation of an AttentionTask, shared by all attention kernels.
#pragma once

#include "kernels/attention/attention.hpp"

namespace ringattn {

// Throws kInternal if the task's views, pages, page runs, state or sinks do not match the kernel's spec or its tiles of
// `key_tile` keys.
void check_attention_task(const AttentionSpec& spec, int key_tile, const AttentionTask& task);

}  // namespace ringattn
