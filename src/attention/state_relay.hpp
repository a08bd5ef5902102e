// SPDX-License-Identifier: Apache-2.0
// How the states of a range of heads go through all runs of a rank, and on to other ranks, while the kernel works on
// the other ranges: on a device in a stream of its own, on a host whenever the kernel calls between its pieces.
//
// A state that has arrived is carried through this rank's run and handed on at once. So a hop from rank to rank hides
// behind what ranks have to do anyway, as long as they have something to do.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "attention/ssm_timeline.hpp"
#include "attention/state_exchange.hpp"
#include "comm/timeouts.hpp"
#include "comm/transport.hpp"
#include "kernels/backend.hpp"
#include "kernels/priority_stream.hpp"
#include "kernels/ssm.hpp"

namespace ringattn {

class StateRelay {
 public:
  // All outlive the object. `ranges` are those of the exchange.
  StateRelay(SsmKernel& kernel, std::span<const HeadRange> ranges, StateExchange& exchange, Transport& transport,
             Backend& backend, const Timeouts& timeouts);

  // How many times a scan waits for states, at most: as SsmTimeline counts waits.
  static std::size_t max_waits(std::size_t ranges, int steps);

  // A scan begins, whose kernels work on `stream`. `seconds`: what it is predicted to take. `clock` may be null.
  void enter(const SsmTask& task, Stream stream, double seconds, SsmTimeline* clock);

  // For each range, in order: begin(), and before that of the next range end(), once each.
  //
  // The range has been folded on the stream: it is carried as far as no other rank's states are needed for, and those
  // that are needed are on their way.
  void begin(std::size_t range);
  // On a host, what has arrived of the range that is on its way is carried and handed on. Doesn't wait. A device does
  // so by itself, once end() has been called.
  void advance();
  // The rest. On a device enqueued, on a host done when it returns.
  void end();
  // What the stream does from here on finds the range carried; of the last range, also that nothing reads or writes
  // states any more.
  void join(std::size_t range);

 private:
  bool beside() const { return ahead_ != nullptr; }
  bool arrived() const;
  void wait_for_tickets();
  void carry_and_post();
  void go_on();

  SsmKernel& kernel_;
  std::span<const HeadRange> ranges_;
  StateExchange& exchange_;
  Transport& transport_;
  Timeouts timeouts_;
  // Of a device, where something travels; its marks are of each range that it is folded, and carried, and the end of
  // all.
  std::unique_ptr<PriorityStream> ahead_;

  // Of the scan under way.
  const SsmTask* task_ = nullptr;
  Stream stream_;  // the kernel's
  Stream own_;     // the states', which is the kernel's where nothing travels
  double seconds_ = 0.0;
  SsmTimeline* clock_ = nullptr;
  std::size_t range_ = 0;  // on its way
  bool on_its_way_ = false;
  int step_ = 0;                 // the next one
  int last_carried_ = 0;         // the last step of this rank's runs
  std::vector<Ticket> tickets_;  // of the range, in order
};

}  // namespace ringattn
