// SPDX-License-Identifier: Apache-2.0
// Bytes in the kind of memory that a world moves, written and read from the host.
#pragma once

#include <cstddef>
#include <vector>

#include "base/memory.hpp"
#include "comm/transport.hpp"

namespace ringattn::testing {

using Bytes = std::vector<std::byte>;

// The stream that this rank's thread posts on and waits on. Worlds of devices may set it; it stays the legacy default
// stream where they don't.
Stream& rank_stream();

// A second queue of this rank's device, beside rank_stream(); of host memory there is one queue, the null one.
class SideStream {
 public:
  explicit SideStream(const Transport& world);
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  Stream get() const { return stream_; }
  // Returns when the device has passed everything on it.
  void land() const;

 private:
  Stream stream_;
};

class Memory {
 public:
  Memory(const Transport& world, const Bytes& content);

  std::byte* data() const { return buffer_.data(); }
  // As many bytes as it was made with. Behind everything that is on the rank's stream by now.
  void write(const Bytes& content) const;
  // Its content, after everything that is on the rank's stream by now.
  Bytes read() const;

 private:
  Buffer buffer_;
};

}  // namespace ringattn::testing
