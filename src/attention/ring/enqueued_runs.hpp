// SPDX-License-Identifier: Apache-2.0
// Keeps track of runs that were enqueued but not waited for: events at the begin of the first and the end of the last,
// and their estimated duration. Used by all ops that enqueue.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "comm/failure.hpp"
#include "comm/timeouts.hpp"
#include "comm/transport.hpp"
#include "kernels/common/backend.hpp"

namespace ringattn {

// Calls work(). If it throws, records the failure before the stack unwinds and abandons every exchange in flight, so
// that no peer writes to memory that is about to be freed, and no device waits for a peer forever.
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

// Enqueued runs of one op.
class EnqueuedRuns {
 public:
  // All arguments outlive the object.
  EnqueuedRuns(Backend& backend, Transport& transport, const Timeouts& timeouts);
  // Abandons what is in flight. With several ranks the transport is then unusable.
  ~EnqueuedRuns();
  EnqueuedRuns(const EnqueuedRuns&) = delete;
  EnqueuedRuns& operator=(const EnqueuedRuns&) = delete;

  // Calls work(), which enqueues a run on `stream` (devices) or does it (hosts). Runs end in the order in which they
  // were enqueued. A run that is being captured is not counted, because wait_all() can't wait for it. A failure of
  // work() abandons what is in flight.
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

  // Waits for all runs. First waits for the begin of the first run, as long as a device queue may last
  // (base/device_timeouts.hpp), because the stream may have earlier work of unknown length. Then calls wait(), then
  // waits for the end. A failure abandons what is in flight.
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
  double pending_seconds_ = 0.0;  // estimated duration of the runs
};

// For runs that are waited for. Throws kUnsupported if the stream is being captured, because captured work can't be
// waited for.
void check_not_captured(Backend& backend, Stream stream);

// Throws kUnsupported: a graph can't hold `what` ("this scan"), because the transport `does` something that can't be
// captured ("sends states to other ranks").
[[noreturn]] void refuse_capture(std::string_view what, const Transport& transport, std::string_view does);
// Throws the same if the stream is being captured and there are several ranks.
void check_capture(Backend& backend, Stream stream, std::string_view what, const Transport& transport,
                   std::string_view does);

}  // namespace ringattn
