// SPDX-License-Identifier: Apache-2.0
// Threads that the system may refuse.
#pragma once

#include "base/wording.hpp"

namespace ringattn {

// Throws kUnsupported with `remedy` unless `count` threads can live at this moment. For those whose threads a library
// starts that would end the process where it gets none.
void try_threads(int count, const Wording& remedy);

}  // namespace ringattn
