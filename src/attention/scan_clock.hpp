// SPDX-License-Identifier: Apache-2.0
// When the parts of a scan were done, by the clock of the device.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "kernels/backend.hpp"
#include "kernels/scan.hpp"

namespace ringattn {

// Something that a rank did with a range of heads; seconds since the scan began.
struct ScanPart {
  enum class Kind {
    kFold,    // segments from nothing
    kWait,    // for states of other ranks, with nothing left to do
    kFinish,  // outputs
    kTravel,  // from when the first state of the range could leave to when the last one had arrived
  };
  Kind kind = Kind::kFold;
  HeadRange heads;
  double begin = 0.0;
  double end = 0.0;
};

// What this rank has seen of a scan.
struct ScanStats {
  double seconds = 0.0;          // from the first to the last operation on the stream
  double waiting_seconds = 0.0;  // of them, for other ranks' states, where no other heads filled them
  std::vector<ScanPart> parts;   // in order of their ends; where ScanOptions::timeline asks for them
};

// Marks around a scan and its waits for states; with `timeline` around each of its parts.
class ScanClock {
 public:
  ScanClock(Backend& backend, std::size_t ranges, std::size_t waits, bool timeline);

  void begin(Stream stream);
  void end(Stream stream) { marks_->record(1, stream); }
  // A part that begins and ends here, one inside another at most.
  void begin_part(ScanPart::Kind kind, const HeadRange& heads, Stream stream);
  void end_part(ScanPart::Kind kind, Stream stream);

  // Once the stream has passed the scan.
  ScanStats stats() const;

 private:
  struct Marked {
    ScanPart::Kind kind;
    HeadRange heads;
    std::size_t begin = 0;  // marks
    std::size_t end = 0;
  };

  bool wanted(ScanPart::Kind kind) const { return timeline_ || kind == ScanPart::Kind::kWait; }

  bool timeline_;
  std::unique_ptr<Marks> marks_;  // 0 and 1: of the whole
  std::size_t next_ = 2;
  std::vector<Marked> open_;
  std::vector<Marked> ended_;
};

}  // namespace ringattn
