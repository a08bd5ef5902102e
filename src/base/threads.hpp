// SPDX-License-Identifier: Apache-2.0
// Threads that the system may refuse.
#pragma once

#include <cstdint>

#include "base/message_template.hpp"

namespace ringattn {

// The most threads that anybody may ask for. OpenMP's own numbers have no limit, and what it does beyond the system's
// is to end the process.
inline constexpr int kMaxThreads = 4096;

// Throws kUsage unless it is a number of threads to ask for, 0 standing for a number that the library finds.
void check_threads(std::int64_t threads);

// Throws kUnsupported with `suggestion` unless `count` threads can live at this moment. For those whose threads a
// library starts that would end the process where it gets none.
void try_threads(int count, const MessageTemplate& suggestion);

// The same for a team of so many threads, one of which is the caller.
void try_thread_pool(int threads);

}  // namespace ringattn
