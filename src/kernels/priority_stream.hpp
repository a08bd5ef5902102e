// SPDX-License-Identifier: Apache-2.0
// A queue beside the others, for short work that they wait for.
#pragma once

#include <cstddef>

#include "base/memory.hpp"

namespace ringattn {

// A queue of a device whose kernels come first of what waits for room there, and points in this and other queues.
class PriorityStream {
 public:
  virtual ~PriorityStream() = default;

  virtual Stream stream() = 0;
  // Point `mark` is what has been enqueued on `stream` so far.
  virtual void record(std::size_t mark, Stream stream) = 0;
  // What is enqueued on `stream` from here on is done behind the point, as it was recorded last.
  virtual void follow(std::size_t mark, Stream stream) = 0;
};

}  // namespace ringattn
