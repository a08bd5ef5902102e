// SPDX-License-Identifier: Apache-2.0
// A queue beside the caller's.
#pragma once

#include <cstddef>

#include "base/memory.hpp"

namespace ringattn {

// When a queue's kernels get what room there is on the device.
enum class Turn {
  kFirst,      // first of what waits for room: for short work that others wait for
  kInArrival,  // behind what came before them, as in a queue that was made with no wishes
};

// A queue of a device, and points in this and other queues.
class StreamBeside {
 public:
  virtual ~StreamBeside() = default;

  virtual Stream stream() = 0;
  // Point `mark` is what has been enqueued on `stream` so far.
  virtual void record(std::size_t mark, Stream stream) = 0;
  // What is enqueued on `stream` from here on is done behind the point, as it was recorded last.
  virtual void follow(std::size_t mark, Stream stream) = 0;
};

}  // namespace ringattn
