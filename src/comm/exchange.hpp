// SPDX-License-Identifier: Apache-2.0
// What every transport does with an exchange: check it when it is posted, and keep the order of its rounds while it
// moves. And how one of a single round is made, span by span.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "comm/transport.hpp"

namespace ringattn {

// An exchange of one round. All spans of a peer go as one message, in the order in which they were added.
class OneRound {
 public:
  void send(int peer, SendSpan span) { sends_[peer].push_back(span); }
  void receive(int peer, ReceiveSpan span) { receives_[peer].push_back(span); }
  Exchange exchange(std::string label) &&;  // all that was added

 private:
  std::map<int, std::vector<SendSpan>> sends_;  // by peer
  std::map<int, std::vector<ReceiveSpan>> receives_;
};

// Throws kInternal when the exchange breaks the contract of transport.hpp: a peer outside the world or the rank itself,
// rounds that don't ascend, two messages for one (peer, round), a span of bytes without an address.
void check_exchange(const Exchange& exchange, int rank, int size);

// Throws kInternal unless `ticket` is the next to be waited for: `waited` are done with, `posted` exist.
void check_ticket(Ticket ticket, Ticket waited, Ticket posted);

// Throws kInternal unless a world of `world` ranks can be split to `size`.
void check_split(int size, int world);

// How messages call the exchange: its label, or its number.
std::string exchange_name(const Exchange& exchange, Ticket ticket);

std::size_t message_bytes(const SendMessage& message);
std::size_t message_bytes(const ReceiveMessage& message);

// A send of round r may start once the receives of rounds < r are done.
class RoundGate {
 public:
  explicit RoundGate(const std::vector<ReceiveMessage>& receives);

  bool may_send(int round) const { return first_open_ == open_.size() || open_[first_open_].round >= round; }
  void receive_done(int round);

 private:
  struct Round {
    int round;
    std::size_t receives;  // not done yet
  };
  std::vector<Round> open_;  // ascending
  std::size_t first_open_ = 0;
};

}  // namespace ringattn
