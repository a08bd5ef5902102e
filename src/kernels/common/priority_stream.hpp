// SPDX-License-Identifier: Apache-2.0
// A high-priority stream, for short work that other streams wait for.
#pragma once

#include <cstddef>

#include "base/memory.hpp"

namespace ringattn {

// A device stream whose kernels are scheduled before those of other streams, with events for this and other streams.
class PriorityStream {
 public:
  virtual ~PriorityStream() = default;

  virtual Stream stream() = 0;
  // Records event `mark` on `stream`.
  virtual void record(std::size_t mark, Stream stream) = 0;
  // Makes `stream` wait for event `mark` as last recorded (cudaStreamWaitEvent).
  virtual void follow(std::size_t mark, Stream stream) = 0;
};

}  // namespace ringattn
