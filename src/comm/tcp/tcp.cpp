// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp/tcp.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <utility>

#include "base/failpoint.hpp"
#include "base/rank_liveness.hpp"
#include "comm/collective.hpp"
#include "comm/exchange.hpp"
#include "comm/tcp/tcp_internal.hpp"

namespace ringattn {

namespace {

class TcpTransport final : public Transport {
 public:
  TcpTransport(std::shared_ptr<TcpTransportContext> context, int size, std::uint64_t world, Route route)
      : context_(std::move(context)), size_(size), world_(world), route_(route) {
    const std::lock_guard lock(context_->mutex);
    state_ = context_->open_world(world_);
  }

  ~TcpTransport() override {
    abandon();
    const std::lock_guard lock(context_->mutex);
    context_->close_world(world_);
  }

  int rank() const override { return context_->rank(); }
  int size() const override { return size_; }
  std::string_view name() const override { return "tcp"; }
  MemoryKind memory() const override { return MemoryKind::kHost; }
  Route route() const override { return route_; }

  std::vector<std::string> all_gather(std::string_view bytes, const Deadline& deadline) override {
    return gather_bytes("all-gather", bytes, deadline);
  }
  void barrier(const Deadline& deadline) override { gather_bytes("barrier", {}, deadline); }

  Ticket post(Exchange exchange, Stream) override {
    check_exchange(exchange, rank(), size_);
    const std::lock_guard lock(context_->mutex);
    context_->check_alive_locked();
    const Ticket ticket = next_ticket();
    if (broken_) {
      fail(ErrorCode::kInternal, fmt::format("rank {} can't post {}", rank(), exchange_name(exchange, ticket)),
           "it has given up earlier exchanges", "Abort the world after a failure.");
    }
    const auto flight = std::make_shared<TcpFlight>(std::move(exchange), world_, ticket);
    // Receivers may have announced messages before this post. Entries of one ticket are adjacent.
    for (auto at = state_->ready.lower_bound({ticket, 0, 0});
         at != state_->ready.end() && std::get<0>(at->first) == ticket; at = state_->ready.erase(at)) {
      context_->drop_ready(at->first);
      TcpTransportContext::take_ready(*state_, *flight, std::get<1>(at->first), std::get<2>(at->first), at->second);
    }
    state_->flights.push_back(flight);
    for (std::size_t i = 0; i < flight->receives.size(); ++i) {
      const ReceiveMessage& message = flight->exchange.receives[i];
      FrameHead head;
      head.kind = FrameKind::kReady;
      head.world = world_;
      head.number = ticket;
      head.total = flight->receives[i].left;
      head.shape = span_shape(message);
      head.round = message.round;
      context_->send(message.peer, head);
    }
    context_->start_sends(flight);
    return ticket;
  }

  void wait(Ticket ticket, Stream, const Deadline& deadline) override {
    try {
      std::unique_lock lock(context_->mutex);
      context_->check_alive_locked();
      check_ticket(ticket, state_->waited, next_ticket());
      const std::shared_ptr<TcpFlight> flight = state_->flights.front();
      if (!context_->wait(lock, deadline, [&] { return flight->open == 0 || state_->misfit; })) {
        fail_late(exchange_name(flight->exchange, ticket), deadline, context_->names(), rank(), awaited(*flight));
      }
      check_fit();
      state_->flights.pop_front();
      ++state_->waited;
    } catch (...) {
      note_failure();
      abandon();
      give_up(as_error(std::current_exception()));
      throw;
    }
  }

  void progress() override {
    heartbeat();
    context_->check_alive();
    if (!state_->misfit) return;
    const std::lock_guard lock(context_->mutex);
    check_fit();
  }

  bool finished(Ticket ticket) override {
    const std::lock_guard lock(context_->mutex);
    const auto index = static_cast<std::size_t>(ticket - state_->waited);
    return ticket >= state_->waited && index < state_->flights.size() && state_->flights[index]->open == 0;
  }

  // While the mutex is held no thread accesses spans, and spans of withdrawn flights are never accessed again.
  void abandon() noexcept override {
    const std::lock_guard lock(context_->mutex);
    if (state_->flights.empty()) return;
    broken_ = true;
    for (const auto& flight : state_->flights) flight->withdrawn = true;
    state_->waited = next_ticket();
    state_->flights.clear();
  }

  std::unique_ptr<Transport> split_world(int size, const Deadline& deadline) override {
    check_split(size, size_);
    failpoint("split");
    const std::string mine = std::to_string(size) + ' ';
    std::string number;
    if (rank() == 0) {
      const std::lock_guard lock(context_->mutex);
      number = std::to_string(context_->new_world());
    }
    const std::vector<std::string> all = gather_bytes("split", mine + number, deadline);
    for (const std::string& theirs : all) {
      if (!theirs.starts_with(mine)) {
        fail(ErrorCode::kInternal, fmt::format("rank {} can't split the world to {} ranks", rank(), size),
             fmt::format("another rank splits it to {}", theirs.substr(0, theirs.find(' '))),
             "This is a bug in the caller.");
      }
    }
    if (rank() >= size) return nullptr;
    std::uint64_t world = 0;
    const std::string_view given = std::string_view(all[0]).substr(mine.size());
    const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), world);
    if (error != std::errc{} || end != given.data() + given.size() || !context_->is_new_world(world)) {
      fail(ErrorCode::kPeer, "can't split the world", "rank 0 gave no number for the new one",
           "See whether all ranks run the same build.");
    }
    return std::make_unique<TcpTransport>(context_, size, world, route_);
  }

  bool abort(const Error& error) override {
    abandon();
    return context_->abort(error);
  }

 private:
  Ticket next_ticket() const { return state_->waited + static_cast<Ticket>(state_->flights.size()); }

  // With the mutex held: throws if a peer's side of an exchange differs from this rank's.
  void check_fit() const {
    for (std::size_t i = 0; state_->misfit && i < state_->flights.size(); ++i) {
      const TcpFlight& flight = *state_->flights[i];
      if (!flight.misfit) continue;
      fail(ErrorCode::kInternal,
           fmt::format("the two sides of {} don't fit", exchange_name(flight.exchange, flight.ticket)),
           fmt::format("{} expects other spans from {} than that rank sends", context_->names().name(*flight.misfit),
                       context_->names().name(rank())),
           kMisfitSuggestion);
    }
  }

  // Called when a wait has failed. The handler may start a collective first (comm/collective.hpp), which must not wait
  // for another deadline.
  void give_up(const Error& error) {
    if (error.code() == ErrorCode::kPeer) context_->give_up(error);
  }

  // All ranks send to all ranks, so a rank whose deadline passes knows exactly which ranks have not come.
  std::vector<std::string> gather_bytes(std::string_view what, std::string_view bytes, const Deadline& deadline) {
    if (bytes.size() > kMaxGathered) {
      fail(ErrorCode::kInternal, fmt::format("rank {} gathers {} bytes", rank(), bytes.size()),
           fmt::format("a collective takes {} at most", kMaxGathered));
    }
    try {
      return gather_all(what, bytes, deadline);
    } catch (const Error& error) {
      give_up(error);
      throw;
    }
  }

  std::vector<std::string> gather_all(std::string_view what, std::string_view bytes, const Deadline& deadline) {
    std::unique_lock lock(context_->mutex);
    context_->check_alive_locked();
    const std::int64_t number = state_->begun++;
    FrameHead head;
    head.kind = FrameKind::kGather;
    head.world = world_;
    head.number = number;
    for (int i = 1; i < size_; ++i) context_->send((rank() + i) % size_, head, bytes);
    TcpWorldState::CollectiveState& collective = state_->collectives[number];
    collective.parts.resize(static_cast<std::size_t>(context_->size()));
    collective.parts[static_cast<std::size_t>(rank())] = bytes;
    ++collective.came;
    if (!context_->wait(lock, deadline, [&] { return collective.came == size_; })) {
      std::vector<int> missing;
      for (int peer = 0; peer < size_; ++peer) {
        if (!collective.parts[static_cast<std::size_t>(peer)]) missing.push_back(peer);
      }
      fail_late(what, deadline, context_->names(), rank(), missing);
    }
    std::vector<std::string> all;
    for (int peer = 0; peer < size_; ++peer)
      all.push_back(std::move(*collective.parts[static_cast<std::size_t>(peer)]));
    state_->collectives.erase(number);
    return all;
  }

  static std::vector<int> awaited(const TcpFlight& flight) {
    std::vector<int> peers;
    for (std::size_t i = 0; i < flight.receives.size(); ++i) {
      if (!flight.receives[i].done) peers.push_back(flight.exchange.receives[i].peer);
    }
    for (std::size_t i = 0; i < flight.sends.size(); ++i) {
      // A send that waits for this rank's own receives is not its peer's fault.
      const SendMessage& message = flight.exchange.sends[i];
      if (!flight.sends[i].done && flight.gate.may_send(message.round)) peers.push_back(message.peer);
    }
    std::ranges::sort(peers);
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    return peers;
  }

  const std::shared_ptr<TcpTransportContext> context_;
  const int size_;
  const std::uint64_t world_;
  const Route route_;
  std::shared_ptr<TcpWorldState> state_;
  bool broken_ = false;  // gave up exchanges
};

}  // namespace

TcpWorld make_tcp_world(Bootstrap& bootstrap, const TcpOptions& options) {
  const Timeouts timeouts(options.setup_seconds);
  Connections connections = make_connections(bootstrap, options.address, timeouts, options.secret);
  TcpWorld world;
  Collective(bootstrap, timeouts).run_collectively([&] {
    world.context = std::make_shared<TcpTransportContext>(bootstrap.rank(), std::move(connections));
    world.transport = std::make_unique<TcpTransport>(world.context, bootstrap.size(), 0, options.route);
  });
  return world;
}

std::unique_ptr<Transport> make_tcp_transport(Bootstrap& bootstrap, const TcpOptions& options) {
  return make_tcp_world(bootstrap, options).transport;
}

}  // namespace ringattn
