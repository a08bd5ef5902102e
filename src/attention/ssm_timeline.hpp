// SPDX-License-Identifier: Apache-2.0
// When the parts of a scan were done, by the clock of the device.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "kernels/backend.hpp"
#include "kernels/ssm.hpp"

namespace ringattn {

// Something that a rank did with a range of heads; seconds since the scan began.
struct SsmPhase {
  enum class Kind {
    kSegmentState,  // segments from nothing
    kWait,          // for states of other ranks, with nothing left to do
    kOutput,        // outputs
    kTransfer,      // from when the first state of the range could leave to when the last one had arrived
  };
  Kind kind = Kind::kSegmentState;
  HeadRange heads;
  double begin = 0.0;
  double end = 0.0;
};

// What this rank has seen of a scan.
struct SsmStats {
  double seconds = 0.0;               // from the first to the last operation on the stream
  double exposed_comm_seconds = 0.0;  // of them, for other ranks' states, where no other heads filled them
  std::vector<SsmPhase> parts;        // in order of their ends; where SsmOptions::timeline asks for them
};

// Events around a scan and its waits for states; with `timeline` around each of its parts.
class SsmTimeline {
 public:
  SsmTimeline(Backend& backend, std::size_t ranges, std::size_t waits, bool timeline);

  void begin(Stream stream);
  void end(Stream stream) { marks_->record(1, stream); }
  // A part that begins and ends here, one inside another at most.
  void begin_phase(SsmPhase::Kind kind, const HeadRange& heads, Stream stream);
  void end_phase(SsmPhase::Kind kind, Stream stream);

  // Once the stream has passed the scan.
  SsmStats stats() const;

 private:
  struct Marked {
    SsmPhase::Kind kind;
    HeadRange heads;
    std::size_t begin = 0;  // marks
    std::size_t end = 0;
  };

  bool wanted(SsmPhase::Kind kind) const { return timeline_ || kind == SsmPhase::Kind::kWait; }

  bool timeline_;
  std::unique_ptr<Events> marks_;  // 0 and 1: of the whole
  std::size_t next_ = 2;
  std::vector<Marked> open_;
  std::vector<Marked> ended_;
};

}  // namespace ringattn
