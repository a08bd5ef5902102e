// SPDX-License-Identifier: Apache-2.0
// Inside transport `p2p`: the messages that ranks post each other through mailboxes. A receiver posts a ReceiveNotice
// that says where a message may be written. It describes each allocation (ExportedMemory) before it first refers to it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/p2p/memory.hpp"
#include "comm/p2p/segment.hpp"
#include "comm/transport.hpp"

namespace ringattn {

// A range of an exported allocation. Adjacent spans are merged into one run.
struct Run {
  std::uint64_t allocation = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// Where the receiver of a message wants its bytes.
struct ReceiveNotice {
  std::uint32_t number = 0;  // number of the message between its two ranks
  Ticket ticket = 0;
  std::int64_t announced = kNotAnnounced;  // if set, `number` and `ticket` are unused
  int round = 0;
  std::vector<Run> runs;
};

class P2pMailboxes {
 public:
  P2pMailboxes(const P2pSegment& segment, int rank, int size);

  // describe() and post() only queue. move() sends.
  void describe(int peer, const ExportedMemory& memory);
  void post(int peer, const ReceiveNotice& notice);
  bool has_described(int peer, std::uint64_t allocation) const { return at(peer).described.contains(allocation); }

  // Sends as much as the mailboxes can take, and handles received messages: opens described allocations and queues
  // notices.
  void move(P2pMemory& memory);

  // Returns true if everything queued has been sent.
  bool all_sent() const;

  // Notices of `peer` for exchanges that were not announced and that are not used yet, in order.
  std::deque<ReceiveNotice>& notices(int peer) { return at(peer).notices; }
  // The notice for a message of an announced exchange; nullptr if it has not arrived yet.
  const ReceiveNotice* announced(int peer, std::int64_t exchange, int round) const;
  // Drops the announced notices for this allocation of `peer`, which is about to be closed.
  void forget(int peer, std::uint64_t allocation);

 private:
  struct MailboxPeer {
    std::string outgoing;
    std::size_t sent = 0;  // bytes of `outgoing` sent
    std::string incoming;
    std::set<std::uint64_t> described;
    std::deque<ReceiveNotice> notices;
    std::map<std::pair<std::int64_t, int>, ReceiveNotice> announced;  // by (exchange, round)
  };

  const MailboxPeer& at(int peer) const { return peers_[static_cast<std::size_t>(peer)]; }
  MailboxPeer& at(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
  void receive(int peer, P2pMemory& memory);

  const P2pSegment& segment_;
  const int rank_;
  const int size_;
  std::vector<MailboxPeer> peers_;  // [size]
};

}  // namespace ringattn
