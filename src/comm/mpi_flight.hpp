// SPDX-License-Identifier: Apache-2.0
// Inside transport `mpi`: what a rank knows of an exchange and of its requests while they are on their way.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "comm/exchange.hpp"

namespace ringattn {

// An exchange between post() and wait(). All its messages carry one tag: between a pair of ranks, MPI matches messages
// of one tag in the order in which they were posted, and both sides post theirs by ascending round.
struct MpiFlight {
  explicit MpiFlight(Exchange posted)
      : exchange(std::move(posted)),
        gate(exchange.receives),
        send_requests(exchange.sends.size()),
        receive_requests(exchange.receives.size()),
        open(exchange.sends.size() + exchange.receives.size()) {}

  Exchange exchange;
  RoundGate gate;
  std::vector<std::size_t> send_requests;     // not done yet, of each of exchange.sends that has started
  std::vector<std::size_t> receive_requests;  // not done yet, of each of exchange.receives
  std::size_t started = 0;                    // of exchange.sends
  std::size_t open;                           // messages not done yet, either way
};

// What a request moves: a fragment of a message.
struct MpiFragment {
  Ticket ticket;
  bool receive;
  std::size_t message;
  int bytes;
};

}  // namespace ringattn
