// SPDX-License-Identifier: Apache-2.0
// Inside transport `p2p`: counters in memory that all ranks of a host and their GPUs see, and the stream operations
// that wait for them and write them. Counters only grow; they are compared as int32 differences, so they may wrap.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/cuda.hpp"
#include "comm/transport.hpp"

namespace ringattn {

// Messages of an ordered pair of ranks, counted: made ready by the receiver, done by the sender. And by each rank for
// itself: exchanges whose wait its stream has reached, and passed.
enum class P2pFlag { kReady, kDone, kReached, kPassed };

class P2pFlags {
 public:
  // Collective: rank 0 makes the segment, the others map it. Throws an AgreedError.
  P2pFlags(Bootstrap& world, int device, const Deadline& deadline);
  ~P2pFlags();
  P2pFlags(const P2pFlags&) = delete;
  P2pFlags& operator=(const P2pFlags&) = delete;

  std::uint32_t read(P2pFlag flag, int from, int to) const;
  void write(P2pFlag flag, int from, int to, std::uint32_t value);

  // What a stream is to do, in order.
  struct Operation {
    bool wait = false;  // until the counter is at `value` or beyond; else: set it to `value`, all earlier work visible
    P2pFlag flag = P2pFlag::kReady;
    int from = 0;
    int to = 0;
    std::uint32_t value = 0;
  };
  void enqueue(const std::vector<Operation>& operations, cudaStream_t stream) const;

  // Whether a counter at `value` has come to `wanted`.
  static bool reached(std::uint32_t value, std::uint32_t wanted) {
    return static_cast<std::int32_t>(value - wanted) >= 0;
  }

 private:
  std::size_t index(P2pFlag flag, int from, int to) const;
  std::size_t bytes() const;
  void create(const std::string& name);
  void map(int file);
  void release() noexcept;

  int size_;
  int device_;
  std::byte* host_ = nullptr;
  std::byte* on_device_ = nullptr;  // the same memory, as the GPU addresses it
};

}  // namespace ringattn
