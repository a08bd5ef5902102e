// SPDX-License-Identifier: Apache-2.0
// Checks that the system can start the threads that a caller wants.
#pragma once

#include <cstdint>

#include "base/message_template.hpp"

namespace ringattn {

// The largest number of threads that can be requested. OpenMP itself has no limit, and ends the process when it
// requests more threads than the system allows.
inline constexpr int kMaxThreads = 4096;

// Throws kUsage unless `threads` is from 0 to kMaxThreads. 0 means that the library chooses.
void check_threads(std::int64_t threads);

// Throws kUnsupported with `suggestion` unless `count` more threads can run at this moment. Call it before a library
// starts threads that would end the process when it gets none.
void try_threads(int count, const MessageTemplate& suggestion);

// The same for a ThreadPool of `threads` threads, one of which is the caller.
void try_thread_pool(int threads);

}  // namespace ringattn
