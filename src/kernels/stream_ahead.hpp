// SPDX-License-Identifier: Apache-2.0
// A queue beside the others, for short work that they wait for.
#pragma once

#include <cstddef>
#include <memory>

#include "base/memory.hpp"

namespace ringattn {

// A queue of a device whose kernels come first of what waits for room there, and points in this and other queues.
class StreamAhead {
 public:
  virtual ~StreamAhead() = default;

  virtual Stream stream() = 0;
  // Point `mark` is what has been enqueued on `stream` so far.
  virtual void record(std::size_t mark, Stream stream) = 0;
  // What is enqueued on `stream` from here on is done behind the point, as it was recorded last.
  virtual void follow(std::size_t mark, Stream stream) = 0;
};

// A Backend whose calls return before the work is done has such queues, and is one of these besides.
class StreamsAhead {
 public:
  virtual ~StreamsAhead() = default;

  // With `marks` points. The backend outlives it.
  virtual std::unique_ptr<StreamAhead> make_stream_ahead(std::size_t marks) = 0;
};

}  // namespace ringattn
