// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/ssm_timeline.hpp"

#include <algorithm>

namespace ringattn {

SsmTimeline::SsmTimeline(Backend& backend, std::size_t ranges, std::size_t waits, bool timeline)
    : timeline_(timeline), marks_(backend.make_events(2 + 2 * waits + (timeline ? 6 * ranges : 0), true)) {}

void SsmTimeline::begin(Stream stream) {
  next_ = 2;
  open_.clear();
  ended_.clear();
  marks_->record(0, stream);
}

void SsmTimeline::begin_phase(SsmPhase::Kind kind, const HeadRange& heads, Stream stream) {
  if (!wanted(kind)) return;
  open_.push_back({kind, heads, next_});
  marks_->record(next_++, stream);
}

void SsmTimeline::end_phase(SsmPhase::Kind kind, Stream stream) {
  const auto part = std::ranges::find(open_, kind, &Marked::kind);
  if (part == open_.end()) return;
  part->end = next_;
  marks_->record(next_++, stream);
  ended_.push_back(*part);
  open_.erase(part);
}

SsmStats SsmTimeline::stats() const {
  SsmStats stats;
  stats.seconds = marks_->elapsed(0, 1);
  for (const Marked& part : ended_) {
    if (part.kind == SsmPhase::Kind::kWait) stats.exposed_comm_seconds += marks_->elapsed(part.begin, part.end);
    if (!timeline_) continue;
    stats.parts.push_back({part.kind, part.heads, marks_->elapsed(0, part.begin), marks_->elapsed(0, part.end)});
  }
  return stats;
}

}  // namespace ringattn
