// SPDX-License-Identifier: Apache-2.0
// The overlap loop of a run over the ring: while block b is computed, block b + 1 is received. The op provides the
// computation as a RingStep. Called by RingRuns.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "attention/ring/block_mover.hpp"
#include "attention/ring/plan.hpp"
#include "attention/ring/timeline.hpp"
#include "comm/timeouts.hpp"
#include "comm/transport.hpp"
#include "kernels/common/backend.hpp"

namespace ringattn {

// A block that has arrived.
struct ArrivedBlock {
  std::int64_t index = 0;  // into Plan::blocks; its rows lie in the block buffer of the same parity
  bool first = false;
  bool last = false;
};

// An op's computation on the blocks of a run. Calls enqueue on `stream` (devices) or do the work (hosts).
class RingStep {
 public:
  virtual ~RingStep() = default;

  // Called once before the first block is sent: work that produces rows to be sent.
  virtual void prepare(Stream /*stream*/, const Progress& /*progress*/) {}
  // Called once while the first block is in flight: work that needs no block.
  virtual void begin(Stream /*stream*/, const Progress& /*progress*/) {}
  virtual void compute(const ArrivedBlock& block, Stream stream, const Progress& progress) = 0;
  // Called after the last block. Returns true if it enqueued or did any work.
  virtual bool finish(Stream stream, const Progress& progress) = 0;
};

// Progress of a run, for progress displays: `done` of `all` blocks.
struct StepCount {
  std::int64_t done = 0;
  std::int64_t all = 0;
  std::optional<double> work = {};  // share of the run's work in the done blocks, 0 to 1; absent: all blocks are equal
};
// Called after each block.
using BlockDone = std::function<void(const StepCount& blocks)>;

// Progress after the first `done` blocks of the plan, weighted by this rank's FLOPs.
StepCount blocks_done(const Plan& plan, std::int64_t done);

struct RingLoop {
  const Plan& plan;
  Transport& transport;
  Backend& backend;
  RingStep& step;
  BlockMover* mover = nullptr;   // bound to this run's memory; nullptr: no exchange
  Timeline* timeline = nullptr;  // nullptr: not timed
  bool overlap = true;           // receive block b + 1 while block b is computed
  Timeouts timeouts;
  double longest_block = 0.0;  // estimated seconds to compute the longest block
};

// Enqueues all blocks of a run. `block_done` is only called with backends that do the work before a call returns. After
// a failure the caller abandons what is in flight.
void enqueue_blocks(const RingLoop& loop, Stream stream, const BlockDone& block_done);

}  // namespace ringattn
