// SPDX-License-Identifier: Apache-2.0
// Device timestamps of the phases of an SSM run.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "kernels/common/backend.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn {

// A phase of a head range on this rank, in seconds since the run began.
struct SsmPhase {
  enum class Kind {
    kSegmentState,  // states of segments from a zero initial state
    kWait,          // for states of other ranks, with nothing left to compute
    kOutput,        // outputs
    kTransfer,      // from when the range's first state could be sent to when its last one had arrived
  };
  Kind kind = Kind::kSegmentState;
  HeadRange heads;
  double begin = 0.0;
  double end = 0.0;
};

// Timing of one run on this rank.
struct SsmStats {
  double seconds = 0.0;               // from the first to the last operation on the stream
  double exposed_comm_seconds = 0.0;  // waits for states of other ranks that no other heads' work hid
  std::vector<SsmPhase> parts;        // in order of their ends; only with SsmOptions::timeline
};

// Events around a run and its waits for states; with `timeline` also around each phase.
class SsmTimeline {
 public:
  SsmTimeline(Backend& backend, std::size_t ranges, std::size_t waits, bool timeline);

  void begin(Stream stream);
  void end(Stream stream) { marks_->record(1, stream); }
  // Begin and end of a phase. Phases nest at most two deep.
  void begin_phase(SsmPhase::Kind kind, const HeadRange& heads, Stream stream);
  void end_phase(SsmPhase::Kind kind, Stream stream);

  // Valid once the stream has passed the run.
  SsmStats stats() const;

 private:
  struct Marked {
    SsmPhase::Kind kind;
    HeadRange heads;
    std::size_t begin = 0;  // index into marks_
    std::size_t end = 0;
  };

  bool wanted(SsmPhase::Kind kind) const { return timeline_ || kind == SsmPhase::Kind::kWait; }

  bool timeline_;
  std::unique_ptr<Events> marks_;  // 0 and 1: begin and end of the run
  std::size_t next_ = 2;
  std::vector<Marked> open_;
  std::vector<Marked> ended_;
};

}  // namespace ringattn
