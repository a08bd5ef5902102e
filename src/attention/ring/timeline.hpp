// SPDX-License-Identifier: Apache-2.0
// Device timestamps of a run: when each block was posted, waited for and computed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/common/backend.hpp"

namespace ringattn {

// Times of one block on this rank, in seconds since the run began, by the clock of the device's stream.
struct BlockTimes {
  double posted = 0.0;      // its exchange may begin
  double wait_begin = 0.0;  // no work left until it arrives
  double compute_begin = 0.0;
  double compute_end = 0.0;
};

struct RunStats {
  double seconds = 0.0;
  double exposed_comm_seconds = 0.0;  // in which the rank waited for blocks
  std::vector<BlockTimes> blocks;
};

// Events of one run, created once and recorded by each timed run.
class Timeline {
 public:
  // `no_exchange`: there is no exchange, so posts and waits have no events. Two events on a GPU are 3 us apart.
  Timeline(Backend& backend, std::size_t blocks, bool no_exchange);

  void start(Stream stream);
  void post(std::int64_t block, Stream stream);
  void begin_wait(std::int64_t block, Stream stream);
  void begin_compute(std::int64_t block, Stream stream);
  void end_compute(std::int64_t block, Stream stream);
  // Records the end of the run, after RingStep::finish().
  void end(Stream stream);

  // Returns when the device has computed the block.
  void await_compute(std::int64_t block, const Deadline& deadline, const Progress& progress);
  // Times of the last run. Valid once the device has passed it.
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
  std::size_t mark_exchange(Stream stream) { return no_exchange_ ? next_ - 1 : mark(stream); }
  Block& at(std::int64_t block) { return blocks_[static_cast<std::size_t>(block)]; }

  const bool no_exchange_;
  std::vector<Block> blocks_;
  std::unique_ptr<Events> marks_;
  std::size_t next_ = 0;  // number of marks recorded in this run; the first is its begin, the last its end
};

}  // namespace ringattn
