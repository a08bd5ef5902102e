// SPDX-License-Identifier: Apache-2.0
// The one loop that holds both a Transport and a Backend: walks the plan, the next block in flight while this one is
// computed. What is computed is a RingStep's business.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "attention/ring/block_mover.hpp"
#include "attention/ring/plan.hpp"
#include "attention/ring/timeline.hpp"
#include "comm/timeouts.hpp"
#include "comm/transport.hpp"
#include "kernels/backend.hpp"

namespace ringattn {

// A block whose rows are in place.
struct ArrivedBlock {
  std::int64_t index = 0;  // into Plan::blocks; its rows lie in the block buffer of the same parity
  bool first = false;
  bool last = false;
};

// What an op does with the blocks of a run. Its calls enqueue on `stream` (devices) or do the work (hosts).
class RingStep {
 public:
  virtual ~RingStep() = default;

  // While the first block travels: what the op does once, before it needs any block.
  virtual void begin(Stream /*stream*/, const Progress& /*progress*/) {}
  virtual void compute(const ArrivedBlock& block, Stream stream, const Progress& progress) = 0;
  // Behind the last block. Returns whether that was anything.
  virtual bool finish(Stream stream, const Progress& progress) = 0;
};

// Called after each block with the number of blocks done and of all blocks; for progress displays.
// `done` of `all` steps are done.
struct StepCount {
  std::int64_t done = 0;
  std::int64_t all = 0;
  std::optional<double> work = {};  // share of the work that the done steps were, 0 to 1; absent: steps are alike
};
using BlockDone = std::function<void(const StepCount& blocks)>;

// The first `done` blocks of the plan, weighed by this rank's FLOPs.
StepCount blocks_done(const Plan& plan, std::int64_t done);

struct RingLoop {
  const Plan& plan;
  Transport& transport;
  Backend& backend;
  RingStep& step;
  BlockMover* mover = nullptr;   // bound to this run's memory; nullptr: nothing travels
  Timeline* timeline = nullptr;  // nullptr: nobody asks for times
  bool overlap = true;           // the next block travels while this one is computed
  Timeouts timeouts;
  double longest_block = 0.0;  // predicted seconds of computing one
};

// Enqueues all blocks of a run. `block_done` is called by backends that do the work before a call returns. What is in
// flight after a failure is for the caller to give up.
void enqueue_blocks(const RingLoop& loop, Stream stream, const BlockDone& block_done);

}  // namespace ringattn
