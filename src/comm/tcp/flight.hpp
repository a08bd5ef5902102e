// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: an exchange in flight.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "comm/exchange.hpp"

namespace ringattn {

// The progress of a message through its spans, as iovecs for system calls.
class SpanCursor {
 public:
  // Fills `iovecs` with the remaining spans, at most `max_bytes` of them, and returns the number of iovecs used.
  template <typename Span>
  std::size_t fill_iovecs(const std::vector<Span>& spans, std::span<iovec> iovecs, std::size_t max_bytes) const {
    std::size_t count = 0;
    std::size_t offset = offset_;
    for (std::size_t i = span_; i < spans.size() && count < iovecs.size() && max_bytes > 0; ++i) {
      const std::size_t bytes = std::min(spans[i].bytes - offset, max_bytes);
      // sendmsg() only reads the spans, but iovec has no const form.
      if (bytes > 0) iovecs[count++] = {const_cast<std::byte*>(spans[i].data) + offset, bytes};
      max_bytes -= bytes;
      offset = 0;
    }
    return count;
  }

  template <typename Span>
  void advance(const std::vector<Span>& spans, std::size_t bytes) {
    while (bytes > 0) {
      const std::size_t left = spans[span_].bytes - offset_;
      const std::size_t step = std::min(left, bytes);
      bytes -= step;
      offset_ += step;
      if (step == left) {
        ++span_;
        offset_ = 0;
      }
    }
  }

 private:
  std::size_t span_ = 0;
  std::size_t offset_ = 0;
};

// An exchange that this rank has posted. Guarded by the mutex of its context.
struct TcpFlight {
  struct Send {
    bool ready = false;  // the receiver has posted its side
    bool started = false;
    bool done = false;
    SpanCursor cursor;
    std::size_t left = 0;  // bytes
  };
  struct Receive {
    bool done = false;
    SpanCursor cursor;
    std::size_t left = 0;  // bytes
  };

  TcpFlight(Exchange posted, std::uint64_t in_world, Ticket number)
      : exchange(std::move(posted)),
        world(in_world),
        ticket(number),
        gate(exchange.receives),
        sends(exchange.sends.size()),
        receives(exchange.receives.size()),
        open(sends.size() + receives.size()) {
    for (std::size_t i = 0; i < sends.size(); ++i) sends[i].left = message_bytes(exchange.sends[i]);
    for (std::size_t i = 0; i < receives.size(); ++i) receives[i].left = message_bytes(exchange.receives[i]);
  }

  const Exchange exchange;
  const std::uint64_t world;
  const Ticket ticket;
  RoundGate gate;
  std::vector<Send> sends;        // [exchange.sends]
  std::vector<Receive> receives;  // [exchange.receives]
  std::size_t open;               // messages not done yet, in both directions
  bool withdrawn = false;         // its spans may be freed
  std::optional<int> misfit{};    // a peer whose side has different spans or lacks a message
};

// The index in `messages` of the message with that peer and round; messages.size() if there is none.
template <typename Message>
std::size_t find_message(const std::vector<Message>& messages, int peer, int round) {
  auto found = std::lower_bound(messages.begin(), messages.end(), round,
                                [](const Message& message, int value) { return message.round < value; });
  while (found != messages.end() && found->round == round && found->peer != peer) ++found;
  if (found != messages.end() && found->round != round) found = messages.end();
  return static_cast<std::size_t>(found - messages.begin());
}

// A hash of the sizes of a message's spans. It is equal on both sides if they match.
template <typename Message>
std::uint32_t span_shape(const Message& message) {
  std::uint64_t hash = 0xCBF29CE484222325U;  // FNV-1a
  for (const auto& span : message.spans) {
    if (span.bytes > 0) hash = (hash ^ span.bytes) * 0x100000001B3U;
  }
  return static_cast<std::uint32_t>(hash ^ hash >> 32);
}

}  // namespace ringattn
