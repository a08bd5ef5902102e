// SPDX-License-Identifier: Apache-2.0
#include "base/rank_liveness.hpp"

#include <pthread.h>

#include "base/interrupt.hpp"

namespace ringattn {

namespace {

thread_local RankLiveness* current_liveness = nullptr;

RankLiveness::Clock::rep now() { return RankLiveness::Clock::now().time_since_epoch().count(); }

}  // namespace

RankLiveness::RankLiveness(int rank) : rank_(rank), last_heartbeat_(now()), last_work_(last_heartbeat_.load()) {}

RankLiveness* RankLiveness::current() { return current_liveness; }

void RankLiveness::heartbeat() {
  last_work_ = now();
  waiting_heartbeat();
}

void RankLiveness::waiting_heartbeat() {
  last_heartbeat_ = now();
  on_heartbeat();
}

double RankLiveness::processor_seconds() const {
  struct timespec used = {};
  if (!attached_ || ::clock_gettime(processor_clock_, &used) != 0) return 0.0;
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

RankLivenessScope::RankLivenessScope(RankLiveness& liveness) : liveness_(liveness) {
  clockid_t clock = {};
  if (::pthread_getcpuclockid(::pthread_self(), &clock) == 0) liveness.processor_clock_ = clock;
  liveness.last_heartbeat_ = now();
  liveness.attached_ = true;
  current_liveness = &liveness;
}

RankLivenessScope::~RankLivenessScope() {
  current_liveness = nullptr;
  liveness_.attached_ = false;
}

void heartbeat() {
  poll_interrupt();
  if (current_liveness != nullptr) current_liveness->heartbeat();
}

void waiting_heartbeat() {
  poll_interrupt();
  if (current_liveness != nullptr) current_liveness->waiting_heartbeat();
}

void fail_rank(const Error& error) {
  if (current_liveness != nullptr) current_liveness->on_failure(error);
  throw Error(error);
}

}  // namespace ringattn
