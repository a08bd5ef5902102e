// SPDX-License-Identifier: Apache-2.0
// When the blocks of a run were posted, waited for and folded, by the clock of the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/backend.hpp"

namespace ringattn {

// What happened in a block on this rank; seconds since the run began, on a device by the clock of its stream.
struct BlockTimes {
  double posted = 0.0;      // its transfer may begin
  double wait_begin = 0.0;  // nothing left to fold until it arrives
  double compute_begin = 0.0;
  double compute_end = 0.0;
};

struct RunStats {
  double seconds = 0.0;
  double exposed_comm_seconds = 0.0;  // waiting for blocks
  std::vector<BlockTimes> blocks;
};

// The marks of one run. They are made once and recorded anew by each run that is timed.
class Timeline {
 public:
  // `alone`: nothing is ever exchanged, so nothing is marked around it. Two marks on a GPU are 3 us apart.
  Timeline(Backend& backend, std::size_t blocks, bool alone);

  void start(Stream stream);
  void post(std::int64_t block, Stream stream);
  void begin_wait(std::int64_t block, Stream stream);
  void begin_compute(std::int64_t block, Stream stream);
  void end_compute(std::int64_t block, Stream stream);
  // What was enqueued behind the last fold belongs to the run too.
  void end(Stream stream);

  // Returns when the device has folded the block.
  void await_compute(std::int64_t block, const Deadline& deadline, const Progress& progress);
  // Of the last run, once the device has passed it.
  RunStats stats() const;

 private:
  // Indices into marks_.
  struct Block {
    std::size_t posted = 0;
    std::size_t wait_begin = 0;
    std::size_t compute_begin = 0;
    std::size_t compute_end = 0;
  };

  std::size_t mark(Stream stream);
  std::size_t mark_exchange(Stream stream) { return alone_ ? next_ - 1 : mark(stream); }
  Block& at(std::int64_t block) { return blocks_[static_cast<std::size_t>(block)]; }

  const bool alone_;
  std::vector<Block> blocks_;
  std::unique_ptr<Events> marks_;
  std::size_t next_ = 0;  // marks recorded in this run; the first is its start, the last its end
};

}  // namespace ringattn
