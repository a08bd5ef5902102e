// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: the state that a world shares with the worlds split from it. It holds the links to all ranks,
// the thread that serves them, the reported failures, and the data that has arrived for each world.
//
// A killed process closes its connections, so its peers notice at once. A process that is stopped or disconnected keeps
// them: deadlines reveal it, and heartbeats (comm/heartbeat_monitor.hpp) if the ranks send them.
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/rank_liveness.hpp"
#include "comm/failure.hpp"
#include "comm/tcp/connections.hpp"
#include "comm/tcp/link.hpp"
#include "comm/timeouts.hpp"

namespace ringattn {

// The posted exchanges of one of the worlds, and what has arrived for it. Guarded by the mutex of its context.
struct TcpWorldState {
  struct CollectiveState {
    std::vector<std::optional<std::string>> parts;  // [ranks of the context]
    int came = 0;
  };
  // A receiver's announcement of a message (FrameKind::kReady), received before this rank posted its side.
  struct Ready {
    std::uint64_t total;
    std::uint32_t shape;
  };
  // Identifies a message of this rank by its ticket, receiver and round.
  using Address = std::tuple<Ticket, int, int>;

  std::map<std::int64_t, CollectiveState> collectives;
  std::int64_t begun = 0;  // collectives that this rank has begun; others may be one ahead
  bool is_open = false;    // this rank has joined the world
  std::map<Address, Ready> ready;
  std::deque<std::shared_ptr<TcpFlight>> flights;  // posted and not yet waited for, in order
  Ticket waited = 0;                               // number of the first of them
  std::atomic<bool> misfit{false};                 // one of the flights has a misfit
};

class TcpTransportContext final : public LinkOwner {
 public:
  TcpTransportContext(int rank, Connections connections);
  // Tells the other ranks that nothing follows, and waits briefly until everything is sent.
  ~TcpTransportContext() override;
  TcpTransportContext(const TcpTransportContext&) = delete;
  TcpTransportContext& operator=(const TcpTransportContext&) = delete;

  std::mutex mutex;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(links_.size()); }
  const RankNames& names() const { return names_; }

  // The mutex must be held. Returns the state of a world. Data for it may have arrived before this call.
  std::shared_ptr<TcpWorldState> open_world(std::uint64_t world);
  void close_world(std::uint64_t world);
  // An early announcement has been used up.
  void drop_ready(const TcpWorldState::Address& address);
  // The number of a world to be split from one of these. Rank 0 assigns it, as it is a member of every world.
  std::uint64_t new_world() { return ++last_world_; }
  // Returns true if this rank has never joined a world of that number.
  bool is_new_world(std::uint64_t world);
  void send(int peer, const FrameHead& head, std::string_view body = {});
  // Starts the sends of an exchange that may start.
  void start_sends(const std::shared_ptr<TcpFlight>& flight);
  // Marks a send as ready if the receiver's side of it matches. Otherwise records the misfit in the flight.
  static void take_ready(TcpWorldState& world, TcpFlight& flight, int peer, int round,
                         const TcpWorldState::Ready& ready);

  // Blocks the calling rank until `done()`, with the mutex held before and after. Returns false when
  // wait_expired(deadline). Throws once a rank has failed, disconnected or fallen silent.
  template <typename Done>
  bool wait(std::unique_lock<std::mutex>& lock, const Deadline& deadline, const Done& done) {
    for (std::uint64_t seen = moved_;;) {
      check_alive_locked();
      if (done()) return true;
      if (wait_expired(deadline)) return false;
      const auto next = Deadline::Clock::now() + kPollInterval;
      changed_.wait_until(lock, deadline.expired() ? next : std::min(next, deadline.end()));
      const std::uint64_t now = moved_;
      lock.unlock();
      // Transferred bytes are work, however slow the link.
      std::exchange(seen, now) == now ? waiting_heartbeat() : heartbeat();
      lock.lock();
    }
  }

  void check_alive_locked() const;
  // The same for callers that don't hold the mutex. It does not lock the mutex unless the world has failed.
  void check_alive();

  // This rank has given up waiting: every later call throws `failure`, unless another rank has reported a failure.
  void give_up(const Error& failure);

  // Notifies all other ranks, then waits briefly for ranks that failed at the same time. The lowest of them prints.
  // Returns true if this rank is to print. A rank that has heard of a failure before only forwards that one.
  bool abort(const Error& error);
  // `callback` is called on the links' thread when a rank reports its failure, because the calling rank may be
  // computing.
  void set_failure_callback(std::function<void(const Error&)> callback);
  // Waits until the process that prints has ended, or `seconds` have passed.
  void await_printer(double seconds);

  // Heartbeats. take_heartbeats() returns each kind that has arrived from `peer` since the last call, in order.
  // send_heartbeat() returns false if the previous heartbeat has not been sent yet. After the `last` one this rank is
  // no longer needed, so closing its connection is not a failure.
  std::string take_heartbeats(int peer);
  bool send_heartbeat(int peer, char heartbeat, bool last);

 private:
  // How often a waiting rank polls.
  static constexpr std::chrono::milliseconds kPollInterval{20};
  // The number of worlds that peers may have joined before this rank. All ranks of a world take part in a split, so
  // usually there is one such world. There are several if a rank destroys worlds late.
  static constexpr std::size_t kMaxEarlyWorlds = 16;
  // In such a world: the largest contribution of a peer to a collective, and the number of messages that a peer may
  // announce before this rank has posted them.
  static constexpr std::uint32_t kMaxEarlyGathered = std::uint32_t{1} << 20;
  static constexpr std::size_t kMaxEarlyReady = std::size_t{1} << 16;

  bool accepts_frame(int peer, const FrameHead& head) const override;
  bool find_destination(int peer, const FrameHead& head, Destination& destination) override;
  void data_received(const Destination& destination) override;
  bool frame_received(int peer, const FrameHead& head, std::string body) override;
  void data_sent(const std::shared_ptr<TcpFlight>& flight, std::size_t send) override;
  bool gather_received(TcpWorldState& world, int peer, const FrameHead& head, std::string body) const;

  // The state of a world that this rank may not have joined yet.
  TcpWorldState& find_world(std::uint64_t world);
  void serve();
  void receive_all(const std::vector<pollfd>& sockets);
  void end_link(TcpLink& link);
  void flush(TcpLink& link);
  void wake();
  bool all_small_sent() const;
  void notify_all_ranks(int rank, const Error& error);

  const int rank_;
  const RankNames names_;
  std::deque<TcpLink> links_;  // [ranks]; this rank's own is closed
  std::map<std::uint64_t, std::shared_ptr<TcpWorldState>> worlds_;
  std::size_t early_worlds_ = 0;          // worlds that this rank has not joined yet
  std::vector<std::size_t> early_ready_;  // [ranks] announcements in such worlds and for exchanges not posted yet
  std::set<std::uint64_t> ended_worlds_;
  std::uint64_t last_world_ = 0;
  std::map<int, Error> reports_;         // reported failures, by rank
  std::optional<Error> given_up_;        // a rank disconnected without a notice, or give_up() was called
  bool notified_ = false;                // this rank has notified all others of a failure
  std::vector<bool> left_;               // [ranks] has left in order
  std::vector<std::string> heartbeats_;  // [ranks] received and not yet taken
  std::function<void(const Error&)> failure_callback_;
  std::condition_variable changed_;
  std::atomic<bool> over_{false};  // a rank has failed or disconnected
  std::atomic<std::uint64_t> moved_{0};
  bool ending_ = false;
  FileDescriptor wake_;
  std::thread thread_;  // last, because it uses all of the above
};

}  // namespace ringattn
