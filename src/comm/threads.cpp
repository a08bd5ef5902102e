// SPDX-License-Identifier: Apache-2.0
#include "comm/threads.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "base/failpoint.hpp"
#include "base/rank_liveness.hpp"
#include "comm/exchange.hpp"
#include "comm/failure.hpp"
#include "comm/threads_transport_context.hpp"
#include "comm/threads_watchdog.hpp"

namespace ringattn {

namespace {

// A collective call that not all ranks have joined yet.
struct CollectiveState {
  std::vector<std::optional<std::string>> bytes;  // [ranks] empty for ranks that have not joined
  std::size_t came = 0;
};

class ThreadsWorld;
std::unique_ptr<Transport> make_transport(std::shared_ptr<ThreadsWorld> world, int rank);

class ThreadsWorld {
 public:
  ThreadsWorld(std::shared_ptr<ThreadsTransportContext> context, int size)
      : context_(std::move(context)), ranks_(static_cast<std::size_t>(size)) {}

  int size() const { return static_cast<int>(ranks_.size()); }
  ThreadsTransportContext& context() { return *context_; }

  std::vector<std::string> all_gather(int rank, std::string_view bytes, std::string_view what,
                                      const Deadline& deadline) {
    std::unique_lock lock(context_->mutex);
    context_->check_alive_locked();
    const std::int64_t number = at(rank).collectives++;
    std::shared_ptr<CollectiveState>& entry = collectives_[number];
    if (entry == nullptr) {
      entry = std::make_shared<CollectiveState>();
      entry->bytes.resize(ranks_.size());
    }
    const std::shared_ptr<CollectiveState> collective = entry;
    collective->bytes[static_cast<std::size_t>(rank)] = bytes;
    if (++collective->came == ranks_.size()) {
      collectives_.erase(number);
      for (int other = 0; other < size(); ++other) context_->notify(other);
    }
    const auto complete = [&] { return collective->came == ranks_.size(); };
    if (!context_->wait(lock, rank, deadline, complete)) {
      std::vector<int> missing;
      for (int other = 0; other < size(); ++other) {
        if (!collective->bytes[static_cast<std::size_t>(other)]) missing.push_back(other);
      }
      fail_late(what, deadline, RankNames(), rank, missing);
    }
    lock.unlock();  // a complete collective never changes
    std::vector<std::string> all;
    all.reserve(ranks_.size());
    for (const auto& theirs : collective->bytes) all.push_back(*theirs);
    return all;
  }

  Ticket post(int rank, Exchange exchange) {
    check_exchange(exchange, rank, size());
    const std::lock_guard lock(context_->mutex);
    context_->check_alive_locked();
    Rank& mine = at(rank);
    const Ticket ticket = mine.waited + static_cast<Ticket>(mine.flights.size());
    if (mine.abandoned) {
      fail(ErrorCode::kInternal, fmt::format("rank {} can't post {}", rank, exchange_name(exchange, ticket)),
           "it has given up earlier exchanges", "Abort the world after a failure.");
    }
    const auto flight = std::make_shared<ThreadsFlight>(std::move(exchange), rank, ticket);
    const std::vector<Link> links = find_links(flight);  // throws before anything has changed
    for (const Link& link : links) {
      link.from->sends[link.send].to = link.to;
      link.from->sends[link.send].receive = link.receive;
    }
    mine.flights.push_back(flight);
    context_->start_sends(flight);
    for (const Link& link : links) {
      if (link.from != flight) context_->start_sends(link.from);
    }
    return ticket;
  }

  void wait(int rank, Ticket ticket, const Deadline& deadline) {
    std::unique_lock lock(context_->mutex);
    context_->check_alive_locked();
    Rank& mine = at(rank);
    check_ticket(ticket, mine.waited, mine.waited + static_cast<Ticket>(mine.flights.size()));
    const std::shared_ptr<ThreadsFlight> flight = mine.flights.front();
    if (!context_->wait(lock, rank, deadline, [&] { return flight->open == 0; })) {
      fail_late(exchange_name(flight->exchange, ticket), deadline, RankNames(), rank, awaited(*flight));
    }
    mine.flights.pop_front();
    ++mine.waited;
  }

  bool finished(int rank, Ticket ticket) {
    const std::lock_guard lock(context_->mutex);
    context_->check_alive_locked();
    const Rank& mine = at(rank);
    const auto index = static_cast<std::size_t>(ticket - mine.waited);
    return ticket >= mine.waited && index < mine.flights.size() && mine.flights[index]->open == 0;
  }

  void abandon(int rank) {
    std::unique_lock lock(context_->mutex);
    Rank& mine = at(rank);
    if (mine.flights.empty()) return;
    mine.abandoned = true;
    for (const auto& flight : mine.flights) {
      flight->withdrawn = true;
      for (ThreadsFlight::Send& send : flight->sends) send.to.reset();
    }
    context_->wait_for_deliveries(lock, rank, [&] {
      return std::all_of(mine.flights.begin(), mine.flights.end(),
                         [](const auto& flight) { return flight->copying == 0; });
    });
    mine.waited += static_cast<Ticket>(mine.flights.size());
    mine.flights.clear();
  }

  std::unique_ptr<Transport> split_world(int rank, int size, const Deadline& deadline) {
    check_split(size, this->size());
    failpoint("split");
    const std::int64_t number = at(rank).collectives;  // only this rank's thread changes it
    const std::string mine = std::to_string(size);
    for (const std::string& theirs : all_gather(rank, mine, "split", deadline)) {
      if (theirs != mine) {
        fail(ErrorCode::kInternal, fmt::format("rank {} can't split the world to {} ranks", rank, size),
             fmt::format("another rank splits it to {}", theirs), "This is a bug in the caller.");
      }
    }
    if (rank >= size) return nullptr;
    const std::lock_guard lock(context_->mutex);
    Child& child = children_[number];
    if (child.world == nullptr) child.world = std::make_shared<ThreadsWorld>(context_, size);
    std::shared_ptr<ThreadsWorld> world = child.world;
    if (++child.taken == size) children_.erase(number);
    return make_transport(std::move(world), rank);
  }

 private:
  struct Rank {
    std::deque<std::shared_ptr<ThreadsFlight>> flights;  // posted and not yet waited for, in order
    Ticket waited = 0;                                   // number of the first of them
    std::int64_t collectives = 0;                        // collectives that this rank has joined
    bool abandoned = false;
  };
  struct Link {
    std::shared_ptr<ThreadsFlight> from;
    std::size_t send;
    std::shared_ptr<ThreadsFlight> to;
    std::size_t receive;
  };
  struct Child {
    std::shared_ptr<ThreadsWorld> world;
    int taken = 0;
  };

  Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

  // The flight of `rank` with that number; nullptr if it isn't posted yet.
  std::shared_ptr<ThreadsFlight> find_flight(int rank, Ticket ticket, const ThreadsFlight& wanted_by) {
    const Rank& peer = at(rank);
    if (peer.abandoned) return nullptr;
    if (ticket < peer.waited) mismatch(wanted_by, rank, "which it has finished already");
    const auto index = static_cast<std::size_t>(ticket - peer.waited);
    return index < peer.flights.size() ? peer.flights[index] : nullptr;
  }

  // The messages of `flight` whose other side is posted.
  std::vector<Link> find_links(const std::shared_ptr<ThreadsFlight>& flight) {
    std::vector<Link> links;
    for (std::size_t i = 0; i < flight->sends.size(); ++i) {
      const SendMessage& send = flight->exchange.sends[i];
      const auto peer = find_flight(send.peer, flight->ticket, *flight);
      if (peer == nullptr) continue;
      links.push_back(
          {flight, i, peer, find_message(peer->exchange.receives, flight->rank, send.round, *flight, *peer)});
    }
    for (std::size_t i = 0; i < flight->received.size(); ++i) {
      const ReceiveMessage& receive = flight->exchange.receives[i];
      const auto peer = find_flight(receive.peer, flight->ticket, *flight);
      if (peer == nullptr) continue;
      links.push_back(
          {peer, find_message(peer->exchange.sends, flight->rank, receive.round, *flight, *peer), flight, i});
    }
    for (const Link& link : links) {
      const auto& sent = link.from->exchange.sends[link.send].spans;
      const auto& wanted = link.to->exchange.receives[link.receive].spans;
      if (!std::equal(sent.begin(), sent.end(), wanted.begin(), wanted.end(),
                      [](const SendSpan& a, const ReceiveSpan& b) { return a.bytes == b.bytes; })) {
        const int peer = link.from == flight ? link.to->rank : link.from->rank;
        mismatch(*flight, peer, "with spans of other sizes");
      }
    }
    return links;
  }

  template <typename Message>
  static std::size_t find_message(const std::vector<Message>& messages, int peer, int round, const ThreadsFlight& mine,
                                  const ThreadsFlight& theirs) {
    auto found = std::lower_bound(messages.begin(), messages.end(), round,
                                  [](const Message& message, int value) { return message.round < value; });
    while (found != messages.end() && found->round == round && found->peer != peer) ++found;
    if (found == messages.end() || found->round != round) {
      mismatch(mine, theirs.rank, fmt::format("without such a message in round {}", round));
    }
    return static_cast<std::size_t>(found - messages.begin());
  }

  [[noreturn]] static void mismatch(const ThreadsFlight& mine, int peer, std::string_view how) {
    fail(ErrorCode::kInternal, fmt::format("the two sides of {} don't fit", exchange_name(mine.exchange, mine.ticket)),
         fmt::format("rank {} has a message with rank {}, which has posted it {}", mine.rank, peer, how),
         kMisfitSuggestion);
  }

  static std::vector<int> awaited(const ThreadsFlight& flight) {
    std::vector<int> peers;
    for (std::size_t i = 0; i < flight.received.size(); ++i) {
      if (!flight.received[i]) peers.push_back(flight.exchange.receives[i].peer);
    }
    for (std::size_t i = 0; i < flight.sends.size(); ++i) {
      // A send that waits for this rank's own receives is not its peer's fault.
      const SendMessage& message = flight.exchange.sends[i];
      if (!flight.sends[i].done && flight.gate.may_send(message.round)) peers.push_back(message.peer);
    }
    std::sort(peers.begin(), peers.end());
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    return peers;
  }

  const std::shared_ptr<ThreadsTransportContext> context_;
  std::vector<Rank> ranks_;
  std::map<std::int64_t, std::shared_ptr<CollectiveState>> collectives_;  // collectives that not all ranks have joined
  std::map<std::int64_t, Child> children_;  // split worlds that not all ranks have fetched
};

// One rank's view of the world.
class ThreadsTransport final : public Transport {
 public:
  ThreadsTransport(std::shared_ptr<ThreadsWorld> world, int rank) : world_(std::move(world)), rank_(rank) {}
  ~ThreadsTransport() override { world_->abandon(rank_); }

  int rank() const override { return rank_; }
  int size() const override { return world_->size(); }
  std::string_view name() const override { return "threads"; }
  MemoryKind memory() const override { return MemoryKind::kHost; }
  Route route() const override { return world_->context().delivery().route; }

  std::vector<std::string> all_gather(std::string_view bytes, const Deadline& deadline) override {
    return world_->all_gather(rank_, bytes, "all-gather", deadline);
  }
  void barrier(const Deadline& deadline) override { world_->all_gather(rank_, {}, "barrier", deadline); }

  Ticket post(Exchange exchange, Stream) override { return world_->post(rank_, std::move(exchange)); }
  void wait(Ticket ticket, Stream, const Deadline& deadline) override {
    try {
      world_->wait(rank_, ticket, deadline);
    } catch (...) {
      note_failure();
      world_->abandon(rank_);
      throw;
    }
  }
  void progress() override {
    heartbeat();
    world_->context().check_alive();
  }
  bool finished(Ticket ticket) override { return world_->finished(rank_, ticket); }
  void abandon() noexcept override { world_->abandon(rank_); }

  std::unique_ptr<Transport> split_world(int size, const Deadline& deadline) override {
    return world_->split_world(rank_, size, deadline);
  }
  bool abort(const Error& error) override { return world_->context().abort(rank_, error); }

 private:
  const std::shared_ptr<ThreadsWorld> world_;
  const int rank_;
};

std::unique_ptr<Transport> make_transport(std::shared_ptr<ThreadsWorld> world, int rank) {
  return std::make_unique<ThreadsTransport>(std::move(world), rank);
}

}  // namespace

std::vector<std::unique_ptr<Transport>> make_threads_world(int size, const ThreadsDelivery& delivery) {
  if (size < 1) {
    fail(ErrorCode::kUsage, fmt::format("can't make a world of {} ranks", size), "it takes at least one",
         "Ask for one rank or more.");
  }
  const auto world = std::make_shared<ThreadsWorld>(std::make_shared<ThreadsTransportContext>(size, delivery), size);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < size; ++rank) transports.push_back(make_transport(world, rank));
  return transports;
}

void run_ranks(std::vector<std::unique_ptr<Transport>> transports, const std::function<void(Transport&)>& rank_main,
               const RanksLimit* limit) {
  std::optional<ThreadsWatchdog> watchdog;
  if (limit != nullptr) watchdog.emplace(static_cast<int>(transports.size()), *limit);
  std::mutex mutex;
  std::exception_ptr first;
  const auto record = [&](const std::exception_ptr& exception) {
    const std::lock_guard lock(mutex);
    if (first == nullptr) first = exception;
  };
  const auto run_rank = [&](Transport& transport) {
    std::optional<RankLivenessScope> liveness;
    if (watchdog) liveness.emplace(watchdog->liveness(transport.rank()));
    try {
      rank_main(transport);
    } catch (const AgreedError&) {
      record(std::current_exception());  // the other ranks throw it too, so no rank is left waiting
    } catch (...) {
      const Error error = as_error(std::current_exception());
      if (watchdog) watchdog->liveness(transport.rank()).on_failure(error);
      // Record only the first rank that aborts: errors of the other ranks may be consequences.
      if (transport.abort(error)) record(std::current_exception());
    }
  };
  std::vector<std::thread> threads;
  try {
    for (auto& transport : transports) threads.emplace_back([&run_rank, &transport] { run_rank(*transport); });
  } catch (const std::system_error& error) {
    const Error refused(ErrorCode::kUnsupported,
                        fmt::format("can't start the thread of rank {} of {}", threads.size(), transports.size()),
                        error.code().message(),
                        "Use fewer ranks, or raise the limit on this user's processes (ulimit -u).");
    if (transports[0]->abort(refused)) record(std::make_exception_ptr(refused));
  }
  for (std::thread& thread : threads) thread.join();
  if (first != nullptr) std::rethrow_exception(first);
}

void run_threads_world(int size, const ThreadsDelivery& delivery, const std::function<void(Transport&)>& rank_main) {
  run_ranks(make_threads_world(size, delivery), rank_main);
}

}  // namespace ringattn
