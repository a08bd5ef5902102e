// SPDX-License-Identifier: Apache-2.0
#include "comm/exchange.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

namespace ringattn {

namespace {

constexpr std::string_view kBug = "This is a bug in the plan or in its caller.";

template <typename Message>
void check_messages(const std::vector<Message>& messages, std::string_view kind, std::string_view name, int rank,
                    int size) {
  int round = 0;
  std::vector<bool> seen(static_cast<std::size_t>(size));  // peers of the current round
  for (const Message& message : messages) {
    const auto broken = [&](std::string_view why) {
      fail(ErrorCode::kInternal,
           fmt::format("{}: rank {} can't {} in round {} with rank {}", name, rank, kind, message.round, message.peer),
           why, kBug);
    };
    if (message.peer < 0 || message.peer >= size) broken(fmt::format("the world has {} ranks", size));
    if (message.peer == rank) broken("a rank has no messages for itself");
    if (message.round < round) broken(fmt::format("it comes after round {}", round));
    if (message.round > round) seen.assign(seen.size(), false);
    round = message.round;
    const auto peer = static_cast<std::size_t>(message.peer);
    if (seen[peer]) broken("there is such a message already");
    seen[peer] = true;
    for (const auto& span : message.spans) {
      if (span.data == nullptr && span.bytes > 0) broken(fmt::format("{} bytes have no address", span.bytes));
    }
  }
}

template <typename Message>
std::size_t sum_spans(const Message& message) {
  std::size_t bytes = 0;
  for (const auto& span : message.spans) bytes += span.bytes;
  return bytes;
}

}  // namespace

Exchange OneRound::exchange(std::string label) && {
  Exchange exchange;
  exchange.label = std::move(label);
  for (auto& [peer, spans] : sends_) exchange.sends.push_back({peer, 0, std::move(spans)});
  for (auto& [peer, spans] : receives_) exchange.receives.push_back({peer, 0, std::move(spans)});
  return exchange;
}

void check_exchange(const Exchange& exchange, int rank, int size) {
  const std::string_view name = exchange.label.empty() ? std::string_view("exchange") : exchange.label;
  check_messages(exchange.sends, "send", name, rank, size);
  check_messages(exchange.receives, "receive", name, rank, size);
}

void check_ticket(Ticket ticket, Ticket waited, Ticket posted) {
  if (ticket == waited && waited < posted) return;
  fail(ErrorCode::kInternal, fmt::format("can't wait for ticket {}", ticket),
       waited < posted ? fmt::format("the next is {}", waited) : "nothing is in flight",
       "Wait for each ticket once, in the order of post().");
}

void check_split(int size, int world) {
  if (size >= 1 && size <= world) return;
  fail(ErrorCode::kInternal, fmt::format("can't split a world of {} ranks to {}", world, size),
       "there are no such ranks", kBug);
}

std::string exchange_name(const Exchange& exchange, Ticket ticket) {
  return exchange.label.empty() ? fmt::format("exchange {}", ticket) : exchange.label;
}

std::size_t message_bytes(const SendMessage& message) { return sum_spans(message); }
std::size_t message_bytes(const ReceiveMessage& message) { return sum_spans(message); }

RoundGate::RoundGate(const std::vector<ReceiveMessage>& receives) {
  for (const ReceiveMessage& message : receives) {
    if (open_.empty() || open_.back().round != message.round) open_.push_back({message.round, 0});
    ++open_.back().receives;
  }
}

void RoundGate::receive_done(int round) {
  const auto found = std::lower_bound(open_.begin(), open_.end(), round,
                                      [](const Round& entry, int value) { return entry.round < value; });
  --found->receives;
  while (first_open_ < open_.size() && open_[first_open_].receives == 0) ++first_open_;
}

}  // namespace ringattn
