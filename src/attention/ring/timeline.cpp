// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/timeline.hpp"

namespace ringattn {

Timeline::Timeline(Backend& backend, std::size_t blocks, bool no_exchange)
    : no_exchange_(no_exchange),
      blocks_(blocks),
      marks_(backend.make_events(2 + (no_exchange ? 1 : 4) * blocks, true)) {}

std::size_t Timeline::mark(Stream stream) {
  marks_->record(next_, stream);
  return next_++;
}

void Timeline::start(Stream stream) {
  next_ = 0;
  mark(stream);
}

void Timeline::post(std::int64_t block, Stream stream) { at(block).posted = mark_exchange(stream); }
void Timeline::begin_wait(std::int64_t block, Stream stream) { at(block).wait_begin = mark_exchange(stream); }
void Timeline::begin_compute(std::int64_t block, Stream stream) { at(block).compute_begin = mark_exchange(stream); }
void Timeline::end_compute(std::int64_t block, Stream stream) { at(block).compute_end = mark(stream); }
void Timeline::end(Stream stream) { mark(stream); }

void Timeline::await_compute(std::int64_t block, const Deadline& deadline, const Progress& progress) {
  marks_->synchronize(at(block).compute_end, deadline, progress);
}

RunStats Timeline::stats() const {
  RunStats stats;
  stats.blocks.reserve(blocks_.size());
  for (const Block& block : blocks_) {
    const auto since_start = [this](std::size_t mark) { return marks_->elapsed(0, mark); };
    stats.blocks.push_back({since_start(block.posted), since_start(block.wait_begin), since_start(block.compute_begin),
                            since_start(block.compute_end)});
    stats.exposed_comm_seconds += marks_->elapsed(block.wait_begin, block.compute_begin);
  }
  stats.seconds = marks_->elapsed(0, next_ - 1);
  return stats;
}

}  // namespace ringattn
