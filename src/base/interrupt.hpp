// SPDX-License-Identifier: Apache-2.0
// How the caller of a long call ends it: a thread's calls ask its poll function, between two pieces of their work and
// between two polls of a wait (heartbeat() and waiting_heartbeat() of base/rank_liveness.hpp), whether to go on.
#pragma once

namespace ringattn {

struct Interrupt {
  int (*poll)(void* context) = nullptr;  // returns 0 to go on; null: nobody is asked
  void* context = nullptr;
};

// For calls of this thread, from now on.
void set_interrupt(const Interrupt& interrupt);

// A call of this thread begins: it asks for the first time once kSecondsBetweenPolls have passed.
void begin_interruptible();

inline constexpr double kSecondsBetweenPolls = 0.1;

// Whether the call that began last on this thread is ending because its caller wants it to.
bool was_interrupted();

// Asks, unless this thread has asked within kSecondsBetweenPolls. Throws kPeer where the call is to end, having told
// other ranks (fail_rank()).
void poll_interrupt();

}  // namespace ringattn
