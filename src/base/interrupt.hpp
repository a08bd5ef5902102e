// SPDX-License-Identifier: Apache-2.0
// Lets the caller end a long call. A thread's calls ask its poll function whether to continue, between two steps of
// their work and between two polls of a wait (heartbeat() and waiting_heartbeat() of base/rank_liveness.hpp).
#pragma once

namespace ringattn {

struct Interrupt {
  int (*poll)(void* context) = nullptr;  // returns 0 to go on; nullptr: never interrupt
  void* context = nullptr;
};

// Applies to calls of this thread from now on.
void set_interrupt(const Interrupt& interrupt);

// Marks the start of a call on this thread. It polls for the first time after kSecondsBetweenPolls.
void begin_interruptible();

inline constexpr double kSecondsBetweenPolls = 0.1;

// True if the call that this thread began last is ending because its caller interrupted it.
bool was_interrupted();

// Polls, unless this thread has polled within kSecondsBetweenPolls. If the call is to end, it tells other ranks
// (fail_rank()) and throws kPeer.
void poll_interrupt();

}  // namespace ringattn
