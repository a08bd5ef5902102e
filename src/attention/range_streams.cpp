// SPDX-License-Identifier: Apache-2.0
#include "attention/range_streams.hpp"

namespace ringattn {

namespace {

enum : std::size_t { kForks, kJoins, kMarks };

}  // namespace

RangeStreams::RangeStreams(Backend& backend, std::size_t ranges) {
  for (std::size_t range = 1; range < ranges; ++range) {
    beside_.push_back(backend.make_stream_beside(Turn::kInArrival, kMarks));
  }
}

void RangeStreams::run(Stream stream, const std::function<void()>& work) {
  callers_ = stream;
  fork();
  try {
    work();
  } catch (...) {
    try {
      join();
    } catch (...) {
      // The failure that is under way is the one to tell.
    }
    throw;
  }
  join();
}

Stream RangeStreams::of(std::size_t range) const {
  if (range == 0) return callers_;
  const std::unique_ptr<StreamBeside>& own = beside_.at(range - 1);
  return own ? own->stream() : callers_;
}

void RangeStreams::fork() {
  for (const std::unique_ptr<StreamBeside>& own : beside_) {
    if (!own) continue;
    own->record(kForks, callers_);
    own->follow(kForks, own->stream());
  }
}

void RangeStreams::join() {
  for (const std::unique_ptr<StreamBeside>& own : beside_) {
    if (!own) continue;
    own->record(kJoins, own->stream());
    own->follow(kJoins, callers_);
  }
}

}  // namespace ringattn
