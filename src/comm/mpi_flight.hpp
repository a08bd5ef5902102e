// SPDX-License-Identifier: Apache-2.0
// Inside transport `mpi`: the state of an exchange and its requests between post() and wait().
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "comm/exchange.hpp"

namespace ringattn {

// All messages of an exchange use one tag. Between a pair of ranks, MPI matches messages of one tag in the order in
// which they were posted, and both sides post theirs in ascending round order.
struct MpiFlight {
  explicit MpiFlight(Exchange posted)
      : exchange(std::move(posted)),
        gate(exchange.receives),
        send_requests(exchange.sends.size()),
        receive_requests(exchange.receives.size()),
        open(exchange.sends.size() + exchange.receives.size()) {}

  Exchange exchange;
  RoundGate gate;
  std::vector<std::size_t> send_requests;     // [exchange.sends] requests not done yet, of sends that have started
  std::vector<std::size_t> receive_requests;  // [exchange.receives] requests not done yet
  std::size_t started = 0;                    // sends that have started
  std::size_t open;                           // messages not done yet, in both directions
};

// The part of a message that one request moves.
struct MpiFragment {
  Ticket ticket;
  bool receive;
  std::size_t message;
  int bytes;
};

}  // namespace ringattn
