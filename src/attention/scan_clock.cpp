// SPDX-License-Identifier: Apache-2.0
#include "attention/scan_clock.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace ringattn {

namespace {

bool is_work(ScanPart::Kind kind) { return kind == ScanPart::Kind::kFold || kind == ScanPart::Kind::kFinish; }

// For how long at least one range waits.
double waiting_of(std::vector<ScanPart> parts) {
  std::erase_if(parts, [](const ScanPart& part) { return part.kind != ScanPart::Kind::kWait; });
  std::ranges::sort(parts, {}, &ScanPart::begin);
  double seconds = 0.0;
  double counted = 0.0;  // up to here
  for (const ScanPart& part : parts) {
    const double begin = std::max(part.begin, counted);
    if (part.end <= begin) continue;
    seconds += part.end - begin;
    counted = part.end;
  }
  return seconds;
}

}  // namespace

std::vector<ScanPart> idle_parts(const ScanPart& wait, const std::vector<ScanPart>& parts) {
  std::vector<ScanPart> left{wait};
  for (const ScanPart& part : parts) {
    if (!is_work(part.kind)) continue;
    std::vector<ScanPart> rest;
    for (const ScanPart& piece : left) {
      if (part.end <= piece.begin || part.begin >= piece.end) {
        rest.push_back(piece);
        continue;
      }
      if (part.begin > piece.begin) rest.push_back({piece.kind, piece.heads, piece.begin, part.begin});
      if (part.end < piece.end) rest.push_back({piece.kind, piece.heads, part.end, piece.end});
    }
    left = std::move(rest);
  }
  return left;
}

ScanClock::ScanClock(Backend& backend, std::size_t ranges, std::size_t waits, bool timeline)
    : timeline_(timeline), waits_(waits > 0), marks_(backend.make_marks(2 + 2 * waits + 6 * ranges, true)) {}

// Two marks on a GPU are some microseconds apart, so a scan that never waits has none inside.
bool ScanClock::wanted(ScanPart::Kind kind) const { return timeline_ || (waits_ && kind != ScanPart::Kind::kTravel); }

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
  std::vector<ScanPart> parts;
  for (const Marked& part : ended_) {
    parts.push_back({part.kind, part.heads, marks_->elapsed(0, part.begin), marks_->elapsed(0, part.end)});
  }
  for (const ScanPart& part : parts) {
    if (part.kind != ScanPart::Kind::kWait) {
      stats.parts.push_back(part);
      continue;
    }
    std::ranges::copy(idle_parts(part, parts), std::back_inserter(stats.parts));
  }
  stats.waiting_seconds = waiting_of(stats.parts);
  if (!timeline_) stats.parts.clear();
  std::ranges::stable_sort(stats.parts, {}, &ScanPart::end);
  return stats;
}

}  // namespace ringattn
