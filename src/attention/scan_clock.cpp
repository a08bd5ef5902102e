// SPDX-License-Identifier: Apache-2.0
#include "attention/scan_clock.hpp"

#include <algorithm>

namespace ringattn {

ScanClock::ScanClock(Backend& backend, std::size_t ranges, std::size_t waits, bool timeline)
    : timeline_(timeline), marks_(backend.make_marks(2 + 2 * waits + (timeline ? 6 * ranges : 0), true)) {}

void ScanClock::begin(Stream stream) {
  next_ = 2;
  open_.clear();
  ended_.clear();
  marks_->record(0, stream);
}

void ScanClock::begin_part(ScanPart::Kind kind, const HeadRange& heads, Stream stream) {
  if (!wanted(kind)) return;
  open_.push_back({kind, heads, next_});
  marks_->record(next_++, stream);
}

void ScanClock::end_part(ScanPart::Kind kind, Stream stream) {
  const auto part = std::ranges::find(open_, kind, &Marked::kind);
  if (part == open_.end()) return;
  part->end = next_;
  marks_->record(next_++, stream);
  ended_.push_back(*part);
  open_.erase(part);
}

ScanStats ScanClock::stats() const {
  ScanStats stats;
  stats.seconds = marks_->elapsed(0, 1);
  for (const Marked& part : ended_) {
    if (part.kind == ScanPart::Kind::kWait) stats.waiting_seconds += marks_->elapsed(part.begin, part.end);
    if (!timeline_) continue;
    stats.parts.push_back({part.kind, part.heads, marks_->elapsed(0, part.begin), marks_->elapsed(0, part.end)});
  }
  return stats;
}

}  // namespace ringattn
