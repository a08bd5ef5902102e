// SPDX-License-Identifier: Apache-2.0
// Passes the states of a head range through all runs of a rank and on to other ranks, while the kernel computes other
// head ranges. On a device this runs on a separate stream. On a host it runs whenever the kernel calls advance().
//
// An arrived state is carried through this rank's run and sent on at once, so that hops overlap with the ranks' own
// work.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "comm/timeouts.hpp"
#include "comm/transport.hpp"
#include "kernels/common/backend.hpp"
#include "kernels/common/priority_stream.hpp"
#include "kernels/ssm/ssm.hpp"
#include "ops/ssm/ssm_timeline.hpp"
#include "ops/ssm/state_exchange.hpp"

namespace ringattn {

// How a rank carries states, or gradients of states, through its runs.
struct StateCarry {
  std::vector<int> steps;  // of the runs
  // Carries the runs of one step.
  std::function<void(const HeadRange& heads, int step, Stream stream)> carry;
};

class StateRelay {
 public:
  // All arguments outlive the object. `ranges` are those of the exchange.
  StateRelay(std::span<const HeadRange> ranges, StateExchange& exchange, Transport& transport, Backend& backend,
             const Timeouts& timeouts);

  // Maximum number of waits for states in a run, as SsmTimeline counts them.
  static std::size_t max_waits(std::size_t ranges, int steps);

  // A whole run of an SsmKernel or GatedDeltaKernel: accumulates, carries and finishes every head range. With two
  // ranges, the states of one are in flight while the other is accumulated or finished. Arguments as of enter().
  template <class Kernel, class Task>
  void run(Kernel& kernel, const Task& task, Stream stream, double seconds, SsmTimeline* clock) {
    const Progress progress = [this] {
      transport_.progress();
      advance();
    };
    StateCarry carry;
    for (const auto& each : task.runs) carry.steps.push_back(each.step);
    carry.carry = [&](const HeadRange& heads, int step, Stream own) { kernel.carry(task, heads, step, own); };
    run_ranges(
        std::move(carry), stream, seconds, clock,
        [&](std::size_t range) { kernel.accumulate_states(task, ranges_[range], stream, progress); },
        [&](std::size_t range) { kernel.finish(task, ranges_[range], stream, progress); });
  }

  // Begins a run whose kernels work on `stream`. `seconds`: its estimated duration. `clock` may be null.
  void enter(StateCarry carry, Stream stream, double seconds, SsmTimeline* clock);

  // For each range in order: begin(), then end(), once each and before begin() of the next range.
  //
  // Call begin() when the range has been scanned on the stream. It carries states as far as no other rank's states are
  // needed, and posts the exchanges.
  void begin(std::size_t range);
  // On a host, carries the arrived states of the range in flight and sends them on. Doesn't wait. On a device the
  // stream does this after end().
  void advance();
  // Carries the remaining states. On a device this is enqueued, on a host done on return.
  void end();
  // Orders the stream after the carries of the range; for the last range, also after all accesses to states.
  void join(std::size_t range);

 private:
  // What a kernel does with a head range: index into the ranges.
  using RangeWork = std::function<void(std::size_t range)>;

  void run_ranges(StateCarry carry, Stream stream, double seconds, SsmTimeline* clock, const RangeWork& accumulate,
                  const RangeWork& finish);
  bool has_own_stream() const { return ahead_ != nullptr; }
  bool arrived() const;
  void wait_for_tickets();
  void carry_and_post();
  void carry_to_next_receive();

  std::span<const HeadRange> ranges_;
  StateExchange& exchange_;
  Transport& transport_;
  Timeouts timeouts_;
  // On a device with several ranks; its marks: each range scanned, each range carried, and the end of the run.
  std::unique_ptr<PriorityStream> ahead_;

  // The current run.
  StateCarry carry_;
  Stream stream_;  // the kernel's
  Stream own_;     // the states'; the kernel's if nothing is exchanged
  double seconds_ = 0.0;
  SsmTimeline* clock_ = nullptr;
  std::size_t range_ = 0;  // in flight
  bool in_flight_ = false;
  int step_ = 0;                 // the next exchange
  int last_carried_ = 0;         // the last step of this rank's runs
  std::vector<Ticket> tickets_;  // of the range, in order
};

}  // namespace ringattn
