// SPDX-License-Identifier: Apache-2.0
// Helpers that all transports share: checks of an exchange when it is posted, the order of its rounds while it is in
// flight, and a builder of exchanges with a single round.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "comm/transport.hpp"

namespace ringattn {

// What to do where the two sides of an exchange don't fit.
inline constexpr std::string_view kMisfitSuggestion =
    "See whether all ranks make the same calls in the same order, those of gradients too; if they do, this is a bug.";

// Builds an exchange of one round. All spans for a peer form one message, in the order in which they were added.
class OneRound {
 public:
  void send(int peer, SendSpan span) { sends_[peer].push_back(span); }
  void receive(int peer, ReceiveSpan span) { receives_[peer].push_back(span); }
  Exchange exchange(std::string label) &&;  // the exchange of all added spans

 private:
  std::map<int, std::vector<SendSpan>> sends_;  // by peer
  std::map<int, std::vector<ReceiveSpan>> receives_;
};

// Throws kInternal when the exchange breaks the contract of transport.hpp: a peer outside the world or the rank itself,
// rounds that don't ascend, two messages for one (peer, round), or a span with bytes but no address.
void check_exchange(const Exchange& exchange, int rank, int size);

// Throws kInternal unless `ticket` is the next to be waited for. `waited` tickets have been waited for, `posted` exist.
void check_ticket(Ticket ticket, Ticket waited, Ticket posted);

// Throws kInternal unless a world of `world` ranks can be split to its first `size`.
void check_split(int size, int world);

// The name of the exchange in messages: its label, or its number.
std::string exchange_name(const Exchange& exchange, Ticket ticket);

std::size_t message_bytes(const SendMessage& message);
std::size_t message_bytes(const ReceiveMessage& message);

// Allows a send of round r once the receives of all rounds < r are done.
class RoundGate {
 public:
  explicit RoundGate(const std::vector<ReceiveMessage>& receives);

  bool may_send(int round) const { return first_open_ == open_.size() || open_[first_open_].round >= round; }
  void receive_done(int round);

 private:
  struct Round {
    int round;
    std::size_t receives;  // receives that are not done yet
  };
  std::vector<Round> open_;  // ascending
  std::size_t first_open_ = 0;
};

}  // namespace ringattn
