// SPDX-License-Identifier: Apache-2.0
// Runs that were enqueued and that nobody has waited for yet: where the first of them begins, where the last one ends,
// and how long they may take. What every front door that enqueues keeps of its runs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "comm/failure.hpp"
#include "comm/timeouts.hpp"
#include "comm/transport.hpp"
#include "kernels/backend.hpp"

namespace ringattn {

// Calls work(). A failure is noted before the stack unwinds further, and gives up every exchange that is in flight:
// nothing may be written to memory that is about to be freed, and no device wait for a peer for ever.
template <typename Work>
void abandon_on_failure(Transport& transport, const Work& work) {
  try {
    work();
  } catch (...) {
    note_failure();
    transport.abandon();
    throw;
  }
}

class EnqueuedRuns {
 public:
  // Both outlive the object.
  EnqueuedRuns(Backend& backend, Transport& transport, const Timeouts& timeouts);
  // Gives up what is in flight; with several ranks that ends the use of the transport.
  ~EnqueuedRuns();
  EnqueuedRuns(const EnqueuedRuns&) = delete;
  EnqueuedRuns& operator=(const EnqueuedRuns&) = delete;

  // Calls work(), which enqueues a run on `stream` (devices) or does it (hosts). Runs end in the order in which they
  // were enqueued. Where the stream is being captured, nobody will wait for the run here. A failure, wherever in the
  // run, gives up what is in flight.
  template <typename Work>
  void enqueue(Stream stream, double estimated_seconds, const Work& work) {
    abandon_on_failure(transport_, [&] {
      const bool captured = backend_.is_capturing(stream);
      if (!captured) begin(stream);
      work();
      if (!captured) end(stream, estimated_seconds);
    });
  }

  bool any() const { return pending_ > 0; }

  // Waits for all runs: for their beginning as long as a queue may last (base/device_timeouts.hpp), since what the
  // stream holds before them is not known here, then as `wait` says, and to the end. A failure gives up what is in
  // flight.
  void wait_all(const std::function<void()>& wait = {});

 private:
  enum : std::size_t { kFirstBegins, kLastEnds, kMarks };

  void begin(Stream stream);
  void end(Stream stream, double estimated_seconds);

  Backend& backend_;
  Transport& transport_;
  Timeouts timeouts_;
  std::unique_ptr<Events> marks_;
  std::int64_t pending_ = 0;
  double pending_seconds_ = 0.0;  // that they are predicted to take
};

// Of a run that is waited for. Throws kUnsupported where the stream is being captured: there is no end to wait for.
void check_not_captured(Backend& backend, Stream stream);

// Throws kUnsupported: a graph can't hold `what` ("this scan"), for the transport "hands states on to other ranks" or
// whatever it `does` for it.
[[noreturn]] void refuse_capture(std::string_view what, const Transport& transport, std::string_view does);
// The same where the stream is being captured and there are several ranks.
void check_capture(Backend& backend, Stream stream, std::string_view what, const Transport& transport,
                   std::string_view does);

}  // namespace ringattn
