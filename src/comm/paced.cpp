// SPDX-License-Identifier: Apache-2.0
#include "comm/paced.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <thread>
#include <utility>

#include "comm/exchange.hpp"
#include "comm/timeouts.hpp"

namespace ringattn {

namespace {

using Clock = Deadline::Clock;

// How often wait() polls. Sleeping leaves the cores to ranks that compute.
constexpr std::chrono::microseconds kPoll{20};

// One rank's end of a link that transfers one round at a time. The inner transport also matches exchanges by their
// order, so all ranks post the same number of inner exchanges for each exchange: one for each of `size` rounds. Later
// rounds are merged into the last.
class PacedTransport final : public Transport {
 public:
  PacedTransport(std::unique_ptr<Transport> inner, double bytes_per_second)
      : inner_(std::move(inner)), rate_(bytes_per_second), name_(fmt::format("paced {}", inner_->name())) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string_view name() const override { return name_; }
  MemoryKind memory() const override { return inner_->memory(); }
  Route route() const override { return inner_->route(); }

  std::vector<std::string> all_gather(std::string_view bytes, const Deadline& deadline) override {
    return inner_->all_gather(bytes, deadline);
  }
  void barrier(const Deadline& deadline) override { inner_->barrier(deadline); }

  Ticket post(Exchange exchange, Stream stream) override {
    check_exchange(exchange, rank(), size());
    const Ticket ticket = next_ticket();
    Flight& flight = flights_.emplace_back();
    flight.label = exchange_name(exchange, ticket);
    flight.stream = stream;
    flight.rounds.resize(static_cast<std::size_t>(size()));
    for (Exchange& round : flight.rounds) round.label = flight.label;
    for (SendMessage& message : exchange.sends)
      inner_exchange(flight, message.round).sends.push_back(std::move(message));
    for (ReceiveMessage& message : exchange.receives) {
      inner_exchange(flight, message.round).receives.push_back(std::move(message));
    }
    progress();
    return ticket;
  }

  void wait(Ticket ticket, Stream stream, const Deadline& deadline) override {
    try {
      check_ticket(ticket, waited_, next_ticket());
      for (progress(); !finished(ticket); progress()) {
        if (deadline.expired()) fail_waiting(stream, deadline);
        std::this_thread::sleep_for(kPoll);
      }
    } catch (...) {
      abandon();
      throw;
    }
    flights_.pop_front();
    ++waited_;
  }

  void progress() override {
    inner_->progress();
    post_due_rounds();
    while (!inner_in_flight_.empty() && inner_->finished(inner_in_flight_.front())) {
      inner_->wait(inner_in_flight_.front(), Stream{}, Timeouts::none());  // finished: returns at once
      inner_in_flight_.pop_front();
    }
  }

  bool finished(Ticket ticket) override {
    const auto index = static_cast<std::size_t>(ticket - waited_);
    if (ticket < waited_ || index >= flights_.size()) return false;
    const Flight& flight = flights_[index];
    return flight.posted_rounds == flight.rounds.size() && inner_finished(flight.last) && Clock::now() >= flight.passed;
  }

  void abandon() noexcept override {
    waited_ = next_ticket();
    flights_.clear();
    inner_in_flight_.clear();
    inner_->abandon();
  }

  std::unique_ptr<Transport> split_world(int size, const Deadline& deadline) override {
    std::unique_ptr<Transport> world = inner_->split_world(size, deadline);
    return world == nullptr ? nullptr : make_paced_transport(std::move(world), rate_);
  }

  bool abort(const Error& error) override {
    abandon();
    return inner_->abort(error);
  }

 private:
  struct Flight {
    std::string label;
    Stream stream;
    std::vector<Exchange> rounds;   // [size]
    std::size_t posted_rounds = 0;  // rounds posted to `inner`
    Ticket last = -1;               // inner ticket of the last non-empty round posted
    Clock::time_point passed;       // when that round's bytes have passed the link
  };

  Ticket next_ticket() const { return waited_ + static_cast<Ticket>(flights_.size()); }

  static Exchange& inner_exchange(Flight& flight, int round) {
    return flight.rounds[std::min(static_cast<std::size_t>(round), flight.rounds.size() - 1)];
  }

  bool inner_finished(Ticket inner) {
    // Tickets that have left the queue have been waited for.
    return inner_in_flight_.empty() || inner < inner_in_flight_.front() || inner_->finished(inner);
  }

  // Posts the rounds that are due to `inner`, strictly in order.
  void post_due_rounds() {
    for (Flight& flight : flights_) {
      for (; flight.posted_rounds < flight.rounds.size(); ++flight.posted_rounds) {
        Exchange& round = flight.rounds[flight.posted_rounds];
        const double seconds = link_seconds(round);
        const bool empty = round.sends.empty() && round.receives.empty();
        const Clock::time_point now = Clock::now();
        // Earlier rounds may write what this one sends.
        if (!empty && (now < link_free_ || !inner_finished(flight.last))) return;
        const Ticket inner = inner_->post(std::move(round), flight.stream);
        inner_in_flight_.push_back(inner);
        if (empty) continue;
        flight.last = inner;
        link_free_ = now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
        flight.passed = link_free_;
      }
    }
  }

  // Seconds that the link needs for a round. Its two directions are independent.
  double link_seconds(const Exchange& round) const {
    std::size_t sent = 0;
    std::size_t received = 0;
    for (const SendMessage& message : round.sends) sent += message_bytes(message);
    for (const ReceiveMessage& message : round.receives) received += message_bytes(message);
    return static_cast<double>(std::max(sent, received)) / rate_;
  }

  // Called after the deadline: throws an error that names the peers of what is in flight, or else the pace.
  [[noreturn]] void fail_waiting(Stream stream, const Deadline& deadline) {
    const Flight& flight = flights_.front();
    while (!inner_in_flight_.empty() && inner_in_flight_.front() <= flight.last) {
      inner_->wait(inner_in_flight_.front(), stream, deadline);
      inner_in_flight_.pop_front();
    }
    fail(ErrorCode::kPeer, fmt::format("{} did not finish within {:g} s", flight.label, deadline.seconds()),
         fmt::format("rank {} passes {:g} byte{} per second", rank(), rate_, rate_ == 1.0 ? "" : "s"),
         {"Raise ", setting("timeout"), " or RINGATTN_PACE."});
  }

  const std::unique_ptr<Transport> inner_;
  const double rate_;
  const std::string name_;
  std::deque<Flight> flights_;          // posted and not yet waited for, in order
  Ticket waited_ = 0;                   // number of the first of them
  std::deque<Ticket> inner_in_flight_;  // posted to `inner` and not yet waited for, in order
  Clock::time_point link_free_;         // when the link has transferred all posted rounds
};

}  // namespace

std::unique_ptr<Transport> make_paced_transport(std::unique_ptr<Transport> inner, double bytes_per_second) {
  if (!(bytes_per_second > 0.0)) {
    fail(ErrorCode::kUsage, fmt::format("can't pace a transport at {:g} bytes per second", bytes_per_second),
         "it would never finish", "Give a positive rate.");
  }
  return std::make_unique<PacedTransport>(std::move(inner), bytes_per_second);
}

}  // namespace ringattn
