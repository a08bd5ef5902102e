// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: what a world shares with the worlds split from it. The links to all ranks, the thread that
// serves them, who has failed, and what has arrived for whom.
//
// A killed process closes its connections, so its peers know at once. One that is stopped, or cut off, keeps them:
// deadlines tell, and signs of life (comm/heartbeat_monitor.hpp) where ranks give them.
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

// What has arrived for one of the worlds, and what it has posted. Guarded by the mutex of its context.
struct TcpWorldState {
  struct Gathering {
    std::vector<std::optional<std::string>> parts;  // [ranks of the context]
    int came = 0;
  };
  // What a receiver has said of a message, before this rank posted its side.
  struct Ready {
    std::uint64_t total;
    std::uint32_t shape;
  };
  // Of a message of this rank: its ticket, receiver and round.
  using Address = std::tuple<Ticket, int, int>;

  std::map<std::int64_t, Gathering> collectives;
  std::int64_t begun = 0;  // collectives that this rank has taken part in: others may be in the next one
  bool is_open = false;    // this rank is in it
  std::map<Address, Ready> ready;
  std::deque<std::shared_ptr<TcpFlight>> flights;  // posted and not yet waited for, in order
  Ticket waited = 0;                               // number of the first of them
  std::atomic<bool> misfit{false};                 // whether one of the flights has one
};

class TcpTransportContext final : public LinkOwner {
 public:
  TcpTransportContext(int rank, Connections connections);
  // Tells the others that nothing follows, and waits a moment until all has left.
  ~TcpTransportContext() override;
  TcpTransportContext(const TcpTransportContext&) = delete;
  TcpTransportContext& operator=(const TcpTransportContext&) = delete;

  std::mutex mutex;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(links_.size()); }
  const RankNames& names() const { return names_; }

  // With the mutex held. The state of a world; what arrives for one may come before it is made here.
  std::shared_ptr<TcpWorldState> open_world(std::uint64_t world);
  void close_world(std::uint64_t world);
  // What a receiver has said before is used up.
  void drop_ready(const TcpWorldState::Address& address);
  // A number for a world that is split from one of these. Rank 0, which is in all of them, gives it.
  std::uint64_t new_world() { return ++last_world_; }
  // Whether a world's number is none of those that this rank is or was in.
  bool is_new_world(std::uint64_t world);
  void send(int peer, const FrameHead& head, std::string_view body = {});
  // Sends what may go of an exchange.
  void start_sends(const std::shared_ptr<TcpFlight>& flight);
  // Whether the receiver's side of a message fits; notes in the flight where it doesn't.
  static void take_ready(TcpWorldState& world, TcpFlight& flight, int peer, int round,
                         const TcpWorldState::Ready& ready);

  // Blocks the calling rank until `done()`, with the mutex held before and after; false when it has waited enough.
  // Throws once a rank has failed, gone or fallen silent.
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
      // Bytes that flow are work, however slow the link.
      std::exchange(seen, now) == now ? waiting_heartbeat() : heartbeat();
      lock.lock();
    }
  }

  void check_alive_locked() const;
  // The same for those who don't hold the mutex; doesn't take it while all is well.
  void check_alive();

  // This rank has given up waiting: every later call throws the same, unless another rank has told of a failure.
  void give_up(const Error& failure);

  // Tells all other ranks, then waits a moment for ranks that failed at the same time: the lowest of them prints.
  // Whoever has heard of a failure before has nothing to report, and hands on what it has heard.
  bool abort(const Error& error);
  // Called on the thread of the links when a rank tells of its failure: the calling rank may be computing.
  void set_failure_callback(std::function<void(const Error&)> callback);
  // Until the process that prints has ended, or the time is over.
  void await_printer(double seconds);

  // Signs of life: each kind that has come from `peer` since the last call, in order; and sends one, false while the
  // one before has not left. After the `last` one nobody needs this rank any more: that its connection closes tells
  // no one anything.
  std::string take_heartbeats(int peer);
  bool send_heartbeat(int peer, char heartbeat, bool last);

 private:
  // How often a rank that waits looks up.
  static constexpr std::chrono::milliseconds kPollInterval{20};
  // Worlds that peers may be in before this rank is. A world is split from another one by a call of all its ranks, so
  // there is one at a time; several where a rank ends worlds late.
  static constexpr std::size_t kMaxEarlyWorlds = 16;
  // What a peer may contribute to a collective there, and messages that it may be ready for before this rank has posted
  // them.
  static constexpr std::uint32_t kMaxEarlyGathered = std::uint32_t{1} << 20;
  static constexpr std::size_t kMaxEarlyReady = std::size_t{1} << 16;

  bool accepts_frame(int peer, const FrameHead& head) const override;
  bool find_destination(int peer, const FrameHead& head, Destination& destination) override;
  void data_received(const Destination& destination) override;
  bool frame_received(int peer, const FrameHead& head, std::string body) override;
  void data_sent(const std::shared_ptr<TcpFlight>& flight, std::size_t send) override;
  bool gather_received(TcpWorldState& world, int peer, const FrameHead& head, std::string body) const;

  // The state of a world that this rank may not be in yet.
  TcpWorldState& find_world(std::uint64_t world);
  void serve();
  void receive_all(const std::vector<pollfd>& sockets);
  void end_link(TcpLink& link);
  void flush(TcpLink& link);
  void wake();
  bool all_small_sent() const;
  void tell_all(int rank, const Error& error);

  const int rank_;
  const RankNames names_;
  std::deque<TcpLink> links_;  // [ranks]; this rank's own is closed
  std::map<std::uint64_t, std::shared_ptr<TcpWorldState>> worlds_;
  std::size_t early_worlds_ = 0;          // those that this rank is not in yet
  std::vector<std::size_t> early_ready_;  // [ranks]
  std::set<std::uint64_t> ended_worlds_;
  std::uint64_t last_world_ = 0;
  std::map<int, Error> reports_;         // of failures, by rank
  std::optional<Error> gone_;            // a rank has, without a word; or give_up() was called
  bool told_ = false;                    // all others of a failure
  std::vector<bool> left_;               // [ranks] has said that nobody needs it any more
  std::vector<std::string> heartbeats_;  // [ranks]
  std::function<void(const Error&)> failure_callback_;
  std::condition_variable changed_;
  std::atomic<bool> over_{false};  // whether a rank has failed or gone
  std::atomic<std::uint64_t> moved_{0};
  bool ending_ = false;
  FileDescriptor wake_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace ringattn
