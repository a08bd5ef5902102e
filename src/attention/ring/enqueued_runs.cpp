// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/enqueued_runs.hpp"

#include <fmt/format.h>

#include <utility>

#include "base/device_timeouts.hpp"
#include "base/error.hpp"

namespace ringattn {

EnqueuedRuns::EnqueuedRuns(Backend& backend, Transport& transport, const Timeouts& timeouts)
    : backend_(backend), transport_(transport), timeouts_(timeouts), marks_(backend.make_events(kMarks, false)) {}

EnqueuedRuns::~EnqueuedRuns() {
  if (pending_ > 0 && transport_.size() > 1) transport_.abandon();
}

void EnqueuedRuns::begin(Stream stream) {
  if (pending_ == 0) marks_->record(kFirstBegins, stream);
}

void EnqueuedRuns::end(Stream stream, double estimated_seconds) {
  marks_->record(kLastEnds, stream);
  ++pending_;
  pending_seconds_ += estimated_seconds;
}

void EnqueuedRuns::wait_all(const std::function<void()>& wait) {
  pending_ = 0;
  const double predicted = std::exchange(pending_seconds_, 0.0);
  const Progress progress = [this] { transport_.progress(); };
  abandon_on_failure(transport_, [&] {
    const Deadline others = DeviceTimeouts::for_queue();
    marks_->synchronize(kFirstBegins, others, [&] {
      progress();
      DeviceTimeouts::check(others, "other work was enqueued on the stream before the first run");
    });
    if (wait) wait();
    marks_->synchronize(kLastEnds, timeouts_.for_work(predicted), progress);
    // A peer's failure may have released this rank's stream; progress() throws it before the end is reported.
    transport_.progress();
  });
}

void check_not_captured(Backend& backend, Stream stream) {
  if (!backend.is_capturing(stream)) return;
  fail(ErrorCode::kUnsupported, "a graph can't hold a run that waits for its end", "captured work has not started",
       "Use enqueue(), or run it outside of the capture.");
}

void refuse_capture(std::string_view what, const Transport& transport, std::string_view does) {
  fail(ErrorCode::kUnsupported, fmt::format("a graph can't hold {}", what),
       fmt::format("transport {} {}, which a replay would not do", transport.name(), does),
       "Enqueue it outside of the capture.");
}

void check_capture(Backend& backend, Stream stream, std::string_view what, const Transport& transport,
                   std::string_view does) {
  if (transport.size() > 1 && backend.is_capturing(stream)) refuse_capture(what, transport, does);
}

}  // namespace ringattn
