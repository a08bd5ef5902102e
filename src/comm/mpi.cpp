// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "base/failpoint.hpp"
#include "base/memory.hpp"
#include "base/rank_liveness.hpp"
#include "comm/exchange.hpp"
#include "comm/failure.hpp"
#include "comm/mpi_calls.hpp"
#include "comm/mpi_flight.hpp"
#include "comm/mpi_internal.hpp"
#include "comm/timeouts.hpp"

namespace ringattn {

namespace {

// A rank can be one collective ahead of another but not two, so two tags suffice to keep collectives apart.
constexpr int kCollectiveTags = 2;
// How long abandon() waits for receives that a peer is writing to at that time.
constexpr double kAbandonSeconds = 0.2;

class MpiTransport final : public Transport {
 public:
  // Ranks 0 … size − 1 of the context. The transport uses the tags of `lane` and holds the lane while it lives.
  MpiTransport(std::shared_ptr<MpiTransportContext> context, int size, int lane, const MpiOptions& options)
      : context_(std::move(context)),
        communicator_(context_->communicator()),
        options_(options),
        rank_(context_->rank()),
        size_(size),
        lane_(lane) {
    context_->acquire_lane(lane_);
  }

  ~MpiTransport() override {
    abandon();
    context_->release_lane(lane_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string_view name() const override { return "mpi"; }
  MemoryKind memory() const override { return MemoryKind::kHost; }
  Route route() const override { return options_.route; }

  std::vector<std::string> all_gather(std::string_view bytes, const Deadline& deadline) override {
    return gather_bytes("all-gather", bytes, deadline);
  }
  void barrier(const Deadline& deadline) override { gather_bytes("barrier", {}, deadline); }

  Ticket post(Exchange exchange, Stream) override {
    context_->check_alive();
    check_exchange(exchange, rank_, size_);
    const Ticket ticket = next_ticket();
    if (broken_ || flights_.size() >= static_cast<std::size_t>(options_.max_exchanges)) {
      fail(ErrorCode::kInternal, fmt::format("rank {} can't post {}", rank_, exchange_name(exchange, ticket)),
           broken_ ? std::string("it has given up earlier exchanges")
                   : fmt::format("{} are in flight, and there are no more tags", flights_.size()),
           broken_ ? "Abort the world after a failure." : "Wait for earlier exchanges first.");
    }
    MpiFlight& flight = flights_.emplace_back(std::move(exchange));
    for (std::size_t i = 0; i < flight.exchange.receives.size(); ++i) {
      const ReceiveMessage& message = flight.exchange.receives[i];
      flight.receive_requests[i] =
          cut(message, {ticket, true, i, 0}, [&](std::byte* data, int count, MPI_Request* request) {
            return mpi().irecv(data, count, mpi().byte_type, message.peer, tag_of(ticket), communicator_, request);
          });
    }
    start_sends(flight, ticket);
    return ticket;
  }

  void wait(Ticket ticket, Stream, const Deadline& deadline) override {
    try {
      check_ticket(ticket, waited_, next_ticket());
      const MpiFlight& flight = flights_.front();
      move();
      for (int idle = 0; flight.open > 0; ++idle) {
        if (wait_expired(deadline)) {
          fail_late(exchange_name(flight.exchange, ticket), deadline, context_->names(), rank_, awaited(flight));
        }
        context_->back_off(idle);
        waiting_heartbeat();
        move();
      }
    } catch (...) {
      note_failure();
      abandon();
      give_up(as_error(std::current_exception()));
      throw;
    }
    flights_.pop_front();
    ++waited_;
  }

  void progress() override {
    heartbeat();
    move();
  }

  bool finished(Ticket ticket) override {
    const auto index = static_cast<std::size_t>(ticket - waited_);
    return ticket >= waited_ && index < flights_.size() && flights_[index].open == 0;
  }

  void abandon() noexcept override {
    if (flights_.empty()) return;
    fail_context();
    // Unmatched receives are cancelled. Receives in flight get a short time to complete. Any that are left after that
    // belong to peers that are dead or stopped. Sends can't be taken back: MPI keeps reading their memory whenever it
    // is called, also to report and hear of the failure, so that memory must stay.
    std::vector<MPI_Request> receives;
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == mpi().request_null) continue;
      if (!fragments_[i].receive) {
        keep_host_memory();
        continue;
      }
      mpi().cancel(&requests_[i]);
      receives.push_back(requests_[i]);
    }
    const Deadline deadline = Timeouts::grace(kAbandonSeconds);
    int done = 0;
    for (int idle = 0; done == 0 && !deadline.expired(); ++idle) {
      mpi().testall(static_cast<int>(receives.size()), receives.data(), &done, MPI_STATUSES_IGNORE);
      if (done == 0) context_->back_off(idle);
    }
    waited_ = next_ticket();
    flights_.clear();
    requests_.clear();
    fragments_.clear();
  }

  std::unique_ptr<Transport> split_world(int size, const Deadline& deadline) override {
    check_split(size, size_);
    failpoint("split");
    // MPI_Comm_split() has no non-blocking form. Ranks keep their numbers, so a lane of tags suffices to form the new
    // world. The lane must be free on all of its ranks.
    const std::string mine = std::to_string(size) + ' ';
    std::vector<std::string> lanes = gather_bytes("split", mine + context_->lanes_in_use(), deadline);
    for (std::string& theirs : lanes) {
      if (!theirs.starts_with(mine)) {
        fail(ErrorCode::kInternal, fmt::format("rank {} can't split the world to {} ranks", rank_, size),
             fmt::format("another rank splits it to {}", theirs.substr(0, theirs.find(' '))),
             "This is a bug in the caller.");
      }
      theirs.erase(0, mine.size());
    }
    lanes.resize(static_cast<std::size_t>(size));
    if (rank_ >= size) return nullptr;
    return std::make_unique<MpiTransport>(context_, size, context_->free_lane(lanes), options_);
  }

  bool abort(const Error& error) override {
    abandon();
    return context_->abort(error);
  }

 private:
  // A collective call in flight.
  struct CollectiveState {
    std::string mine;
    std::vector<std::string> all;  // [size]
    std::vector<bool> came;        // [size]
    std::vector<MPI_Request> requests;
  };

  Ticket next_ticket() const { return waited_ + static_cast<Ticket>(flights_.size()); }
  // Exchanges in flight have different tags on both sides, because no rank has more of them than there are tags.
  int tag_of(Ticket ticket) const {
    return context_->first_tag(lane_) + static_cast<int>(ticket % options_.max_exchanges);
  }
  int collective_tag() const {
    return context_->first_tag(lane_) + options_.max_exchanges + static_cast<int>(collectives_ % kCollectiveTags);
  }

  // Advances requests in flight. It does not count as a heartbeat.
  void move() {
    context_->check_alive();
    while (complete_some()) {
    }
  }

  void fail_context() {
    broken_ = true;
    context_->set_broken();
  }

  // Called when a wait has failed. The handler may start a collective first (comm/collective.hpp), which must not wait
  // for another deadline.
  void give_up(const Error& error) {
    if (error.code() == ErrorCode::kPeer) context_->give_up(error);
  }

  // Passes a message to `start` in fragments of at most request_bytes, and returns their number. Both sides split equal
  // spans, so the fragments match. A message without bytes is one empty fragment.
  template <typename Message, typename Start>
  std::size_t cut(const Message& message, MpiFragment fragment, Start start) {
    const auto begin = [&](auto* data, std::size_t bytes) {
      fragment.bytes = static_cast<int>(bytes);
      MPI_Request request = mpi().request_null;
      check_mpi(start(data, fragment.bytes, &request), fragment.receive ? "MPI_Irecv" : "MPI_Isend");
      requests_.push_back(request);
      fragments_.push_back(fragment);
    };
    const std::size_t before = requests_.size();
    for (const auto& span : message.spans) {
      for (std::size_t at = 0; at < span.bytes; at += options_.request_bytes) {
        begin(span.data + at, std::min(options_.request_bytes, span.bytes - at));
      }
    }
    if (requests_.size() == before) begin(decltype(message.spans.front().data){}, 0);
    return requests_.size() - before;
  }

  void start_sends(MpiFlight& flight, Ticket ticket) {
    for (; flight.started < flight.exchange.sends.size(); ++flight.started) {
      const SendMessage& message = flight.exchange.sends[flight.started];
      if (!flight.gate.may_send(message.round)) return;
      flight.send_requests[flight.started] =
          cut(message, {ticket, false, flight.started, 0}, [&](const std::byte* data, int count, MPI_Request* request) {
            return mpi().isend(data, count, mpi().byte_type, message.peer, tag_of(ticket), communicator_, request);
          });
    }
  }

  // Completes the requests that are done and starts the sends that waited for them. Returns true if there were any.
  bool complete_some() {
    if (requests_.empty()) return false;
    done_.resize(requests_.size());
    statuses_.resize(requests_.size());
    int count = 0;
    const int result =
        mpi().testsome(static_cast<int>(requests_.size()), requests_.data(), &count, done_.data(), statuses_.data());
    if (result != MPI_ERR_IN_STATUS) check_mpi(result, "MPI_Testsome");
    if (count == MPI_UNDEFINED || count == 0) return false;
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      const MpiFragment& fragment = fragments_[static_cast<std::size_t>(done_[i])];
      check_fragment(fragment, result == MPI_SUCCESS ? MPI_SUCCESS : statuses_[i].MPI_ERROR, statuses_[i]);
      complete(fragment);
    }
    std::size_t kept = 0;
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == mpi().request_null) continue;
      requests_[kept] = requests_[i];
      fragments_[kept++] = fragments_[i];
    }
    requests_.resize(kept);
    fragments_.resize(kept);
    heartbeat();  // transferred bytes are work, however slow the link
    for (std::size_t i = 0; i < flights_.size(); ++i) start_sends(flights_[i], waited_ + static_cast<Ticket>(i));
    return true;
  }

  void complete(const MpiFragment& fragment) {
    MpiFlight& flight = flight_of(fragment);
    std::size_t& requests = (fragment.receive ? flight.receive_requests : flight.send_requests)[fragment.message];
    if (--requests > 0) return;
    --flight.open;
    if (fragment.receive) flight.gate.receive_done(flight.exchange.receives[fragment.message].round);
  }

  void check_fragment(const MpiFragment& fragment, int result, const MPI_Status& status) {
    const MpiFlight& flight = flight_of(fragment);
    int bytes = fragment.bytes;
    if (result == MPI_SUCCESS && fragment.receive) mpi().get_count(&status, mpi().byte_type, &bytes);
    if (result == MPI_SUCCESS && bytes == fragment.bytes) return;
    const int peer = fragment.receive ? flight.exchange.receives[fragment.message].peer
                                      : flight.exchange.sends[fragment.message].peer;
    const std::string name = exchange_name(flight.exchange, fragment.ticket);
    int error_class = MPI_SUCCESS;
    mpi().error_class(result, &error_class);
    if (result == MPI_SUCCESS || error_class == MPI_ERR_TRUNCATE) {
      fail(ErrorCode::kInternal, fmt::format("the two sides of {} don't fit", name),
           fmt::format("{} has sent {} a fragment of other than {} bytes", context_->names().name(peer),
                       context_->names().name(rank_), fragment.bytes),
           kMisfitSuggestion);
    }
    check_mpi(result, fmt::format("the transfer of {} between {} and {}", name, context_->names().name(rank_),
                                  context_->names().name(peer)));
  }

  MpiFlight& flight_of(const MpiFragment& fragment) {
    return flights_[static_cast<std::size_t>(fragment.ticket - waited_)];
  }

  static std::vector<int> awaited(const MpiFlight& flight) {
    std::vector<int> peers;
    for (std::size_t i = 0; i < flight.receive_requests.size(); ++i) {
      if (flight.receive_requests[i] > 0) peers.push_back(flight.exchange.receives[i].peer);
    }
    // Sends that haven't started wait for this rank's own receives, so their peers are not to blame.
    for (std::size_t i = 0; i < flight.started; ++i) {
      if (flight.send_requests[i] > 0) peers.push_back(flight.exchange.sends[i].peer);
    }
    std::sort(peers.begin(), peers.end());
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    return peers;
  }

  // All ranks send to all ranks instead of calling MPI_Iallgatherv, so a rank whose deadline passes knows exactly which
  // ranks have not come.
  std::vector<std::string> gather_bytes(std::string_view what, std::string_view bytes, const Deadline& deadline) {
    context_->check_alive();
    const int tag = collective_tag();
    ++collectives_;
    auto collective = std::make_unique<CollectiveState>();
    try {
      gather_all(*collective, tag, what, bytes, deadline);
    } catch (...) {
      // MPI may use the buffers of a broken collective as long as the process lives.
      fail_context();
      static_cast<void>(collective.release());
      give_up(as_error(std::current_exception()));
      throw;
    }
    return std::move(collective->all);
  }

  void gather_all(CollectiveState& collective, int tag, std::string_view what, std::string_view bytes,
                  const Deadline& deadline) {
    collective.mine = bytes;
    collective.all.resize(static_cast<std::size_t>(size_));
    collective.came.resize(static_cast<std::size_t>(size_));
    collective.all[static_cast<std::size_t>(rank_)] = bytes;
    collective.came[static_cast<std::size_t>(rank_)] = true;
    for (int i = 1; i < size_; ++i) {
      const int peer = (rank_ + i) % size_;
      collective.requests.push_back(mpi().request_null);
      check_mpi(mpi().isend(collective.mine.data(), static_cast<int>(collective.mine.size()), mpi().char_type, peer,
                            tag, communicator_, &collective.requests.back()),
                "MPI_Isend");
    }
    int missing = size_ - 1;
    for (int idle = 0;; ++idle) {
      int found = missing;
      while (found != 0) {
        MPI_Message message = mpi().message_null;
        MPI_Status status;
        check_mpi(mpi().improbe(MPI_ANY_SOURCE, tag, communicator_, &found, &message, &status), "MPI_Improbe");
        if (found == 0) break;
        const auto source = static_cast<std::size_t>(status.MPI_SOURCE);
        int count = 0;
        mpi().get_count(&status, mpi().char_type, &count);
        collective.all[source].resize(static_cast<std::size_t>(count));
        collective.came[source] = true;
        collective.requests.push_back(mpi().request_null);
        check_mpi(
            mpi().imrecv(collective.all[source].data(), count, mpi().char_type, &message, &collective.requests.back()),
            "MPI_Imrecv");
        found = --missing;
      }
      int done = 0;
      check_mpi(mpi().testall(static_cast<int>(collective.requests.size()), collective.requests.data(), &done,
                              MPI_STATUSES_IGNORE),
                "MPI_Testall");
      if (missing == 0 && done != 0) return;
      move();
      if (wait_expired(deadline)) fail_late(what, deadline, context_->names(), rank_, absent(collective));
      context_->back_off(idle);
      waiting_heartbeat();
    }
  }

  // The ranks that have not come. If all have come but some don't receive, all other ranks.
  std::vector<int> absent(const CollectiveState& collective) const {
    std::vector<int> missing;
    for (int peer = 0; peer < size_; ++peer) {
      if (!collective.came[static_cast<std::size_t>(peer)]) missing.push_back(peer);
    }
    for (int peer = 0; peer < size_ && missing.empty(); ++peer) {
      if (peer != rank_) missing.push_back(peer);
    }
    return missing;
  }

  const std::shared_ptr<MpiTransportContext> context_;
  const MPI_Comm communicator_;
  const MpiOptions options_;
  const int rank_;
  const int size_;
  const int lane_;
  std::deque<MpiFlight> flights_;  // posted and not yet waited for, in order
  Ticket waited_ = 0;              // number of the first of them
  std::int64_t collectives_ = 0;
  bool broken_ = false;  // gave up exchanges or a collective
  std::vector<MPI_Request> requests_;
  std::vector<MpiFragment> fragments_;  // parallel to requests_
  std::vector<int> done_;
  std::vector<MPI_Status> statuses_;
};

// Checks the options and MPI's state. Returns the highest tag that MPI allows.
int check_ready(const MpiOptions& options) {
  const int highest = highest_mpi_tag();
  constexpr std::size_t kMaxCount = std::size_t{1} << 30;
  if (options.max_exchanges < 1 || options.max_exchanges > highest - 3 || options.request_bytes < 1 ||
      options.request_bytes > kMaxCount) {
    fail(ErrorCode::kUsage, "can't make an mpi transport", "its options are out of range",
         fmt::format("max_exchanges: 1 to {}; request_bytes: 1 to {}.", highest - 3, kMaxCount));
  }
  return highest;
}

}  // namespace

MpiWorld make_mpi_world(MPI_Comm communicator, const MpiOptions& options) {
  const Timeouts timeouts(options.setup_seconds);
  const int highest_tag = check_ready(options);
  MPI_Comm duplicate = mpi().comm_null;
  check_mpi(mpi().comm_dup(communicator, &duplicate), "MPI_Comm_dup");
  mpi().comm_set_errhandler(duplicate, mpi().errors_return);
  MpiWorld world;
  world.context =
      std::make_shared<MpiTransportContext>(duplicate, options.max_exchanges + kCollectiveTags, highest_tag);
  world.transport = std::make_unique<MpiTransport>(world.context, world.context->size(), 0, options);
  world.context->set_hosts(world.transport->all_gather(processor_name(), timeouts.for_peer()));
  return world;
}

std::unique_ptr<Transport> make_mpi_transport(const MpiCalls& calls, MPI_Comm communicator, const MpiOptions& options) {
  use_mpi(calls);
  return make_mpi_world(communicator, options).transport;
}

}  // namespace ringattn
