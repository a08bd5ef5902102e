// SPDX-License-Identifier: Apache-2.0
#include "base/pulse.hpp"

#include <pthread.h>

#include "base/interrupt.hpp"

namespace ringattn {

namespace {

thread_local Pulse* current_pulse = nullptr;

Pulse::Clock::rep now() { return Pulse::Clock::now().time_since_epoch().count(); }

}  // namespace

Pulse::Pulse(int rank) : rank_(rank), seen_(now()), worked_(seen_.load()) {}

Pulse* Pulse::current() { return current_pulse; }

void Pulse::beat() {
  worked_ = now();
  look();
}

void Pulse::look() {
  seen_ = now();
  exchange();
}

double Pulse::processor_seconds() const {
  struct timespec used = {};
  if (!worn_ || ::clock_gettime(processor_clock_, &used) != 0) return 0.0;
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

PulseScope::PulseScope(Pulse& pulse) : pulse_(pulse) {
  clockid_t clock = {};
  if (::pthread_getcpuclockid(::pthread_self(), &clock) == 0) pulse.processor_clock_ = clock;
  pulse.seen_ = now();
  pulse.worn_ = true;
  current_pulse = &pulse;
}

PulseScope::~PulseScope() {
  current_pulse = nullptr;
  pulse_.worn_ = false;
}

void beat() {
  poll_interrupt();
  if (current_pulse != nullptr) current_pulse->beat();
}

void look() {
  poll_interrupt();
  if (current_pulse != nullptr) current_pulse->look();
}

void fail_with_pulse(const Error& error) {
  if (current_pulse != nullptr) current_pulse->failing(error);
  throw Error(error);
}

}  // namespace ringattn
