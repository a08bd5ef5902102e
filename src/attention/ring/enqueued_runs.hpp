// SPDX-License-Identifier: Apache-2.0
// Runs that were enqueued and that nobody has waited for yet: where the first of them begins, where the last one ends,
// and how long they may take. What every front door that enqueues keeps of its runs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "comm/patience.hpp"
#include "comm/transport.hpp"
#include "kernels/backend.hpp"

namespace ringattn {

class EnqueuedRuns {
 public:
  // Both outlive the object.
  EnqueuedRuns(Backend& backend, Transport& transport, const Patience& patience);
  // Gives up what is in flight; with several ranks that ends the use of the transport.
  ~EnqueuedRuns();
  EnqueuedRuns(const EnqueuedRuns&) = delete;
  EnqueuedRuns& operator=(const EnqueuedRuns&) = delete;

  // Around what a run enqueues. They end in the order in which they were enqueued.
  void begin(Stream stream);
  void end(Stream stream, double predicted_seconds);

  bool any() const { return waiting_ > 0; }

  // Waits for all runs: for their beginning as long as a queue may last (base/device_patience.hpp), since what the
  // stream holds before them is not known here, then as `wait` says, and to the end. A failure gives up what is in
  // flight.
  void settle(const std::function<void()>& wait = {});

 private:
  enum : std::size_t { kFirstBegins, kLastEnds, kMarks };

  Transport& transport_;
  Patience patience_;
  std::unique_ptr<Marks> marks_;
  std::int64_t waiting_ = 0;
  double waiting_seconds_ = 0.0;  // that they are predicted to take
};

// Of a run that is waited for. Throws kUnsupported where the stream is being captured: there is no end to wait for.
void check_not_captured(Backend& backend, Stream stream);

}  // namespace ringattn
