// SPDX-License-Identifier: Apache-2.0
#include "base/interrupt.hpp"

#include <chrono>

#include "base/error.hpp"
#include "base/rank_liveness.hpp"

namespace ringattn {

namespace {

using Clock = std::chrono::steady_clock;

struct ThreadInterrupt {
  Interrupt interrupt;
  bool begun = false;        // `next` counts from the start of the current call
  bool interrupted = false;  // the call is ending; its clean-up is not interrupted
  Clock::time_point next;
};

thread_local ThreadInterrupt thread_interrupt;

}  // namespace

void set_interrupt(const Interrupt& interrupt) { thread_interrupt.interrupt = interrupt; }

void begin_interruptible() { thread_interrupt.begun = thread_interrupt.interrupted = false; }

bool was_interrupted() { return thread_interrupt.interrupted; }

void poll_interrupt() {
  ThreadInterrupt& own = thread_interrupt;
  if (own.interrupt.poll == nullptr || own.interrupted) return;
  const Clock::time_point now = Clock::now();
  const auto after = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(kSecondsBetweenPolls));
  if (!own.begun) {
    own.begun = true;
    own.next = now + after;
  }
  if (now < own.next) return;
  const int answer = own.interrupt.poll(own.interrupt.context);
  own.next = Clock::now() + after;
  if (answer == 0) return;
  own.interrupted = true;
  fail_rank(Error(ErrorCode::kPeer, "the call was interrupted", "its caller's poll function asked for that",
                  "Call it again."));
}

}  // namespace ringattn
