// SPDX-License-Identifier: Apache-2.0
// Inside transport `p2p`: what ranks post each other through the mailboxes. A receiver says where a message may be put;
// before it names an allocation for the first time it describes it.
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

// A piece of an exported allocation. Spans that lie next to each other travel as one run.
struct Run {
  std::uint64_t allocation = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// Where the receiver of a message wants it.
struct ReceiveNotice {
  std::uint32_t number = 0;  // of the message, between its two ranks
  Ticket ticket = 0;
  std::int64_t announced = kNotAnnounced;  // else `number` and `ticket` mean nothing
  int round = 0;
  std::vector<Run> runs;
};

class P2pMailboxes {
 public:
  P2pMailboxes(const P2pSegment& segment, int rank, int size);

  // Both only queue; move() sends.
  void describe(int peer, const ExportedMemory& memory);
  void post(int peer, const ReceiveNotice& notice);
  bool has_described(int peer, std::uint64_t allocation) const { return at(peer).described.contains(allocation); }

  // Sends what there is room for and takes what has come: opens described allocations, queues notices.
  void move(P2pMemory& memory);

  // Whether everything that was queued has been sent.
  bool all_sent() const;

  // Notices of single messages that `peer` has told of and that nobody has taken yet, in order.
  std::deque<ReceiveNotice>& notices(int peer) { return at(peer).notices; }
  // The notice of a message of an announced exchange; nullptr while `peer` hasn't told.
  const ReceiveNotice* announced(int peer, std::int64_t exchange, int round) const;
  // Nothing lands in this allocation of `peer` any more.
  void forget(int peer, std::uint64_t allocation);

 private:
  struct MailboxPeer {
    std::string outgoing;
    std::size_t sent = 0;  // of outgoing
    std::string incoming;
    std::set<std::uint64_t> described;
    std::deque<ReceiveNotice> notices;
    std::map<std::pair<std::int64_t, int>, ReceiveNotice> announced;  // by exchange and round
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
