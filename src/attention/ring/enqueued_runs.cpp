// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/enqueued_runs.hpp"

#include <utility>

#include "base/device_patience.hpp"
#include "comm/failure.hpp"

namespace ringattn {

EnqueuedRuns::EnqueuedRuns(Backend& backend, Transport& transport, const Patience& patience)
    : transport_(transport), patience_(patience), marks_(backend.make_marks(kMarks, false)) {}

EnqueuedRuns::~EnqueuedRuns() {
  if (waiting_ > 0 && transport_.size() > 1) transport_.abandon();
}

void EnqueuedRuns::begin(Stream stream) {
  if (waiting_ == 0) marks_->record(kFirstBegins, stream);
}

void EnqueuedRuns::end(Stream stream, double predicted_seconds) {
  marks_->record(kLastEnds, stream);
  ++waiting_;
  waiting_seconds_ += predicted_seconds;
}

void EnqueuedRuns::settle(const std::function<void()>& wait) {
  waiting_ = 0;
  const double predicted = std::exchange(waiting_seconds_, 0.0);
  const Progress progress = [this] { transport_.progress(); };
  try {
    const Deadline others = DevicePatience::for_queue();
    marks_->synchronize(kFirstBegins, others, [&] {
      progress();
      DevicePatience::check(others, "it was enqueued on the stream before the first run, by whoever uses it");
    });
    if (wait) wait();
    marks_->synchronize(kLastEnds, patience_.for_work(predicted), progress);
    // A peer that gave up may have let this rank's stream go on: its failure must be heard before the end.
    transport_.progress();
  } catch (...) {
    note_failure();
    transport_.abandon();
    throw;
  }
}

void check_not_captured(Backend& backend, Stream stream) {
  if (!backend.is_capturing(stream)) return;
  fail(ErrorCode::kUnsupported, "a graph can't hold a run that is waited for", "what is captured has no end yet",
       "Use enqueue(), or run it outside of the capture.");
}

}  // namespace ringattn
