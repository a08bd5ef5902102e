// SPDX-License-Identifier: Apache-2.0
// Inside transport `p2p`: the memory that the ranks of a world share. Counters that streams and CPUs of all ranks see,
// and a mailbox for each ordered pair of ranks.
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

// Of the messages from one rank to another, which both count from 1 in the order of (exchange, round).
struct PairCounters {
  Counter ready;    // the receiver's stream: its memory for the messages up to here is free
  Counter posted;   // the receiver's CPU: it has enqueued that its stream says so
  Counter done;     // the sender's stream: the messages up to here have arrived
  Counter pushing;  // the sender's CPU: it is about to enqueue the push
  Counter pushed;   // the sender's CPU: it has enqueued the push
  Counter forced;   // the sender's CPU, when it gave up: it made itself `ready`, so the receiver's data may be wrong
};

struct RankCounters {
  Counter given_up;  // the rank's CPU: nothing may be pushed to it any more
  Counter gone;      // the rank's CPU: it has closed everything of its peers
  Counter reached;   // the rank's stream: it has come to the wait for the exchanges up to here
  Counter passed;    // the rank's stream: it has gone on from there
};

// Bytes from one CPU to another, in order; either side may find it full or empty. One reader, one writer.
class Mailbox {
 public:
  // As many bytes as there is room for, and how many those are.
  std::size_t write(std::string_view bytes);
  // Appends what has come, and whether anything has.
  bool read(std::string& bytes);

 private:
  static constexpr std::size_t kBytes = 8 * 1024 - 128;

  alignas(64) std::atomic<std::uint64_t> written_;
  alignas(64) std::atomic<std::uint64_t> read_;
  char ring_[kBytes];
};

class P2pSegment {
 public:
  // Collective over `control`: rank 0 makes the memory, all map it, and its name is gone before anybody returns.
  // Throws an AgreedError when a rank can't.
  P2pSegment(Bootstrap& control, const Deadline& deadline);

  PairCounters& pair(int from, int to) const { return pairs_[from * size_ + to]; }
  RankCounters& rank(int rank) const { return ranks_[rank]; }
  Mailbox& mailbox(int from, int to) const { return mailboxes_[from * size_ + to]; }
  // For operations of streams on its counters.
  MemoryOperations operations() const { return MemoryOperations(*map_); }

  // Keeps the memory for the life of the process: a stream that nobody can wait for may still write to it.
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
  PairCounters* pairs_ = nullptr;  // [size, size] from, to
  Mailbox* mailboxes_ = nullptr;   // [size, size]
};

}  // namespace ringattn
