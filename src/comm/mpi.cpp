// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "base/memory.hpp"
#include "base/moment.hpp"
#include "base/pulse.hpp"
#include "comm/exchange.hpp"
#include "comm/failure.hpp"
#include "comm/mpi_calls.hpp"
#include "comm/mpi_flight.hpp"
#include "comm/mpi_parts.hpp"
#include "comm/patience.hpp"

namespace ringattn {

namespace {

// A rank can be one meeting ahead of another but not two, so two tags tell meetings apart.
constexpr int kMeetingTags = 2;
// How long abandon() waits for receives that a peer is writing to at that moment.
constexpr double kAbandonSeconds = 0.2;

class MpiTransport final : public Transport {
 public:
  // Ranks 0 … size − 1 of the family, with the tags of `lane`, which it takes from the family while it lives.
  MpiTransport(std::shared_ptr<MpiFamily> family, int size, int lane, const MpiOptions& options)
      : family_(std::move(family)),
        communicator_(family_->communicator()),
        options_(options),
        rank_(family_->rank()),
        size_(size),
        lane_(lane) {
    family_->take_lane(lane_);
  }

  ~MpiTransport() override {
    abandon();
    family_->give_lane(lane_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string_view name() const override { return "mpi"; }
  MemoryKind memory() const override { return MemoryKind::kHost; }
  Route route() const override { return options_.route; }

  std::vector<std::string> all_gather(std::string_view bytes, const Deadline& deadline) override {
    return meet("all-gather", bytes, deadline);
  }
  void barrier(const Deadline& deadline) override { meet("barrier", {}, deadline); }

  Ticket post(Exchange exchange, Stream) override {
    family_->check_alive();
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
        if (waited_enough(deadline)) {
          fail_late(exchange_name(flight.exchange, ticket), deadline, family_->names(), rank_, awaited(flight));
        }
        family_->rest(idle);
        look();
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
    beat();
    move();
  }

  bool finished(Ticket ticket) override {
    const auto index = static_cast<std::size_t>(ticket - waited_);
    return ticket >= waited_ && index < flights_.size() && flights_[index].open == 0;
  }

  void abandon() noexcept override {
    if (flights_.empty()) return;
    fail_family();
    // What no sender has matched is cancelled; what is on its way gets a moment to arrive. What is left then belongs to
    // peers that are dead or stopped. Sends can't be taken back: MPI goes on reading their memory whenever it is
    // called, to tell and hear of the failure, so that memory must stay.
    std::vector<MPI_Request> receives;
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == mpi().request_null) continue;
      if (!pieces_[i].receive) {
        keep_host_memory();
        continue;
      }
      mpi().cancel(&requests_[i]);
      receives.push_back(requests_[i]);
    }
    const Deadline deadline = Patience::grace(kAbandonSeconds);
    int done = 0;
    for (int idle = 0; done == 0 && !deadline.expired(); ++idle) {
      mpi().testall(static_cast<int>(receives.size()), receives.data(), &done, MPI_STATUSES_IGNORE);
      if (done == 0) family_->rest(idle);
    }
    waited_ = next_ticket();
    flights_.clear();
    requests_.clear();
    pieces_.clear();
  }

  std::unique_ptr<Transport> split(int size, const Deadline& deadline) override {
    check_split(size, size_);
    moment("split");
    // All calls of MPI_Comm_split() block. Ranks keep their numbers, so tags of its own make the part a world; they
    // must be free on all ranks of it.
    const std::string mine = std::to_string(size) + ' ';
    std::vector<std::string> lanes = meet("split", mine + family_->lanes_in_use(), deadline);
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
    return std::make_unique<MpiTransport>(family_, size, family_->free_lane(lanes), options_);
  }

  bool abort(const Error& error) override {
    abandon();
    return family_->abort(error);
  }

 private:
  // A collective call on its way.
  struct Gathering {
    std::string mine;
    std::vector<std::string> all;  // [size]
    std::vector<bool> came;        // [size]
    std::vector<MPI_Request> requests;
  };

  Ticket next_ticket() const { return waited_ + static_cast<Ticket>(flights_.size()); }
  // Exchanges in flight have different tags, on both sides: nobody has more of them than there are tags.
  int tag_of(Ticket ticket) const {
    return family_->first_tag(lane_) + static_cast<int>(ticket % options_.max_exchanges);
  }
  int meeting_tag() const {
    return family_->first_tag(lane_) + options_.max_exchanges + static_cast<int>(meetings_ % kMeetingTags);
  }

  // Moves what is on its way; a sign of nothing.
  void move() {
    family_->check_alive();
    while (complete_some()) {
    }
  }

  void fail_family() {
    broken_ = true;
    family_->set_broken();
  }

  // A wait has failed. Whoever handles that may meet the others first (comm/meeting.hpp), which must not take a
  // deadline more.
  void give_up(const Error& error) {
    if (error.code() == ErrorCode::kPeer) family_->give_up(error);
  }

  // Hands a message to `start` in pieces of at most request_bytes, and counts them. Both sides cut the same spans, so
  // the pieces fit. A message without bytes is one empty piece.
  template <typename Message, typename Start>
  std::size_t cut(const Message& message, MpiPiece piece, Start start) {
    const auto begin = [&](auto* data, std::size_t bytes) {
      piece.bytes = static_cast<int>(bytes);
      MPI_Request request = mpi().request_null;
      check_mpi(start(data, piece.bytes, &request), piece.receive ? "MPI_Irecv" : "MPI_Isend");
      requests_.push_back(request);
      pieces_.push_back(piece);
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

  // Takes the requests that are done and starts the sends that waited for them; whether there were any.
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
      const MpiPiece& piece = pieces_[static_cast<std::size_t>(done_[i])];
      check_piece(piece, result == MPI_SUCCESS ? MPI_SUCCESS : statuses_[i].MPI_ERROR, statuses_[i]);
      complete(piece);
    }
    std::size_t kept = 0;
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == mpi().request_null) continue;
      requests_[kept] = requests_[i];
      pieces_[kept++] = pieces_[i];
    }
    requests_.resize(kept);
    pieces_.resize(kept);
    beat();  // bytes that flow are work, however slow the link
    for (std::size_t i = 0; i < flights_.size(); ++i) start_sends(flights_[i], waited_ + static_cast<Ticket>(i));
    return true;
  }

  void complete(const MpiPiece& piece) {
    MpiFlight& flight = flight_of(piece);
    std::size_t& requests = (piece.receive ? flight.receive_requests : flight.send_requests)[piece.message];
    if (--requests > 0) return;
    --flight.open;
    if (piece.receive) flight.gate.receive_done(flight.exchange.receives[piece.message].round);
  }

  void check_piece(const MpiPiece& piece, int result, const MPI_Status& status) {
    const MpiFlight& flight = flight_of(piece);
    int bytes = piece.bytes;
    if (result == MPI_SUCCESS && piece.receive) mpi().get_count(&status, mpi().byte_type, &bytes);
    if (result == MPI_SUCCESS && bytes == piece.bytes) return;
    const int peer =
        piece.receive ? flight.exchange.receives[piece.message].peer : flight.exchange.sends[piece.message].peer;
    const std::string name = exchange_name(flight.exchange, piece.ticket);
    int error_class = MPI_SUCCESS;
    mpi().error_class(result, &error_class);
    if (result == MPI_SUCCESS || error_class == MPI_ERR_TRUNCATE) {
      fail(ErrorCode::kInternal, fmt::format("the two sides of {} don't fit", name),
           fmt::format("{} has sent {} a piece of other than {} bytes", family_->names().name(peer),
                       family_->names().name(rank_), piece.bytes),
           "This is a bug in the plan.");
    }
    check_mpi(result, fmt::format("the transfer of {} between {} and {}", name, family_->names().name(rank_),
                                  family_->names().name(peer)));
  }

  MpiFlight& flight_of(const MpiPiece& piece) { return flights_[static_cast<std::size_t>(piece.ticket - waited_)]; }

  static std::vector<int> awaited(const MpiFlight& flight) {
    std::vector<int> peers;
    for (std::size_t i = 0; i < flight.receive_requests.size(); ++i) {
      if (flight.receive_requests[i] > 0) peers.push_back(flight.exchange.receives[i].peer);
    }
    // Sends that haven't started are held back by this rank's own receives, and nobody else's fault.
    for (std::size_t i = 0; i < flight.started; ++i) {
      if (flight.send_requests[i] > 0) peers.push_back(flight.exchange.sends[i].peer);
    }
    std::sort(peers.begin(), peers.end());
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    return peers;
  }

  // Everybody sends to everybody instead of calling MPI_Iallgatherv: a rank whose deadline passes then knows exactly
  // who has not come.
  std::vector<std::string> meet(std::string_view what, std::string_view bytes, const Deadline& deadline) {
    family_->check_alive();
    const int tag = meeting_tag();
    ++meetings_;
    auto meeting = std::make_unique<Gathering>();
    try {
      take_part(*meeting, tag, what, bytes, deadline);
    } catch (...) {
      // MPI may use the buffers of a broken meeting as long as the process lives.
      fail_family();
      static_cast<void>(meeting.release());
      give_up(as_error(std::current_exception()));
      throw;
    }
    return std::move(meeting->all);
  }

  void take_part(Gathering& meeting, int tag, std::string_view what, std::string_view bytes, const Deadline& deadline) {
    meeting.mine = bytes;
    meeting.all.resize(static_cast<std::size_t>(size_));
    meeting.came.resize(static_cast<std::size_t>(size_));
    meeting.all[static_cast<std::size_t>(rank_)] = bytes;
    meeting.came[static_cast<std::size_t>(rank_)] = true;
    for (int i = 1; i < size_; ++i) {
      const int peer = (rank_ + i) % size_;
      meeting.requests.push_back(mpi().request_null);
      check_mpi(mpi().isend(meeting.mine.data(), static_cast<int>(meeting.mine.size()), mpi().char_type, peer, tag,
                            communicator_, &meeting.requests.back()),
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
        meeting.all[source].resize(static_cast<std::size_t>(count));
        meeting.came[source] = true;
        meeting.requests.push_back(mpi().request_null);
        check_mpi(mpi().imrecv(meeting.all[source].data(), count, mpi().char_type, &message, &meeting.requests.back()),
                  "MPI_Imrecv");
        found = --missing;
      }
      int done = 0;
      check_mpi(
          mpi().testall(static_cast<int>(meeting.requests.size()), meeting.requests.data(), &done, MPI_STATUSES_IGNORE),
          "MPI_Testall");
      if (missing == 0 && done != 0) return;
      move();
      if (waited_enough(deadline)) fail_late(what, deadline, family_->names(), rank_, absent(meeting));
      family_->rest(idle);
      look();
    }
  }

  // Who has not come; when all have, but don't take what they are sent, everybody else.
  std::vector<int> absent(const Gathering& meeting) const {
    std::vector<int> missing;
    for (int peer = 0; peer < size_; ++peer) {
      if (!meeting.came[static_cast<std::size_t>(peer)]) missing.push_back(peer);
    }
    for (int peer = 0; peer < size_ && missing.empty(); ++peer) {
      if (peer != rank_) missing.push_back(peer);
    }
    return missing;
  }

  const std::shared_ptr<MpiFamily> family_;
  const MPI_Comm communicator_;
  const MpiOptions options_;
  const int rank_;
  const int size_;
  const int lane_;
  std::deque<MpiFlight> flights_;  // posted and not yet waited for, in order
  Ticket waited_ = 0;              // number of the first of them
  std::int64_t meetings_ = 0;
  bool broken_ = false;  // gave up exchanges or a meeting
  std::vector<MPI_Request> requests_;
  std::vector<MpiPiece> pieces_;  // as requests_
  std::vector<int> done_;
  std::vector<MPI_Status> statuses_;
};

// The highest tag that MPI allows.
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
  const Patience patience(options.setup_seconds);
  const int highest_tag = check_ready(options);
  MPI_Comm duplicate = mpi().comm_null;
  check_mpi(mpi().comm_dup(communicator, &duplicate), "MPI_Comm_dup");
  mpi().comm_set_errhandler(duplicate, mpi().errors_return);
  MpiWorld world;
  world.family = std::make_shared<MpiFamily>(duplicate, options.max_exchanges + kMeetingTags, highest_tag);
  world.transport = std::make_unique<MpiTransport>(world.family, world.family->size(), 0, options);
  world.family->set_hosts(world.transport->all_gather(processor_name(), patience.for_peer()));
  return world;
}

std::unique_ptr<Transport> make_mpi_transport(const MpiCalls& calls, MPI_Comm communicator, const MpiOptions& options) {
  use_mpi(calls);
  return make_mpi_world(communicator, options).transport;
}

}  // namespace ringattn
