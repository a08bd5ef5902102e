// SPDX-License-Identifier: Apache-2.0
// Inside transport `p2p`: the host memory that the ranks of a world share. It holds counters that streams and CPUs of
// all ranks access, and a mailbox for each ordered pair of ranks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "comm/p2p/memops.hpp"
#include "comm/transport.hpp"

namespace ringattn {

// Counters of the messages from one rank to another. Both ranks number them from 1 in the order of (exchange, round).
struct PairCounters {
  Counter ready;    // written by the receiver's stream: its memory for the messages up to this number is free
  Counter posted;   // written by the receiver's CPU: the write of `ready` is enqueued
  Counter done;     // written by the sender's stream: the messages up to this number have arrived
  Counter pushing;  // written by the sender's CPU: it is about to enqueue the push
  Counter pushed;   // written by the sender's CPU: the push is enqueued
  Counter forced;   // written by the sender's CPU when it gives up: it wrote `ready` itself, so the receiver's data may
                    // be wrong
};

struct RankCounters {
  Counter given_up;  // written by the rank's CPU: nothing may be pushed to it any more
  Counter gone;      // written by the rank's CPU: it has closed all memory of its peers
  Counter reached;   // written by the rank's stream: it has reached the wait for the exchanges up to this number
  Counter passed;    // written by the rank's stream: it has finished that wait
};

// A ring buffer of bytes from one CPU to another. It never blocks: a full or empty mailbox transfers fewer bytes. One
// reader, one writer.
class Mailbox {
 public:
  // Writes as many bytes as fit, and returns their number.
  std::size_t write(std::string_view bytes);
  // Appends the bytes that have arrived. Returns false if there are none.
  bool read(std::string& bytes);

 private:
  static constexpr std::size_t kBytes = 8 * 1024 - 128;

  alignas(64) std::atomic<std::uint64_t> written_;
  alignas(64) std::atomic<std::uint64_t> read_;
  char ring_[kBytes];
};

class P2pSegment {
 public:
  // Collective over `control`. Rank 0 creates the memory, all ranks map it, and its name is unlinked before any rank
  // returns. Throws an AgreedError if a rank fails.
  P2pSegment(Bootstrap& control, const Deadline& deadline);

  PairCounters& pair(int from, int to) const { return pairs_[from * size_ + to]; }
  RankCounters& rank(int rank) const { return ranks_[rank]; }
  Mailbox& mailbox(int from, int to) const { return mailboxes_[from * size_ + to]; }
  // For stream memory operations on these counters.
  MemoryOperations operations() const { return MemoryOperations(*map_); }

  // Keeps the memory until the process ends, because a stream that can't be waited for may still write to it.
  void leak() { static_cast<void>(mapping_.release()); }

 private:
  class Mapping;
  struct Unmap {
    void operator()(Mapping* mapping) const;
  };

  const int size_;
  std::unique_ptr<Mapping, Unmap> mapping_;
  std::optional<CounterMap> map_;
  RankCounters* ranks_ = nullptr;  // [size]
  PairCounters* pairs_ = nullptr;  // [size, size]: sender, receiver
  Mailbox* mailboxes_ = nullptr;   // [size, size]
};

}  // namespace ringattn
