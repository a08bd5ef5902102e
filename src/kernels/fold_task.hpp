// SPDX-License-Identifier: Apache-2.0
// What every kernel checks before it folds a task.
#pragma once

#include "kernels/fold.hpp"

namespace ringattn {

// Throws kInternal where the task's views, state or sinks don't fit the spec that the kernel was made for.
void check_fold_task(const FoldSpec& spec, const FoldTask& task);

}  // namespace ringattn
