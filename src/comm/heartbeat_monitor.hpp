// SPDX-License-Identifier: Apache-2.0
// The liveness of a rank that is a process: it tells all other ranks that it goes on, hears the same of them, and so
// tells silence from work wherever a rank computes, reads, writes or waits. Only the rank's own thread gives signs: a
// rank that hangs is as silent as one that is stopped, killed or cut off.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/rank_liveness.hpp"
#include "comm/failure.hpp"

namespace ringattn {

enum class Heartbeat : char { kWaiting = 'w', kWorking = 'b', kLeaving = 'l' };

// What carries signs between ranks.
class HeartbeatChannel {
 public:
  virtual ~HeartbeatChannel() = default;

  // Hands over what has come, by rank, in the order in which each has given them. Of equal ones, one is enough.
  virtual void receive(const std::function<void(int, Heartbeat)>& heard) = 0;
  // Gives one to a peer; false where it takes none at this moment. What is on its way to a peer stays bounded.
  virtual bool send(int peer, Heartbeat heartbeat) = 0;
  // Ranks have fallen silent. Where the world can be told so, every later call of it throws `failure` at once: whoever
  // handles the first one may want to meet.
  virtual void give_up(const Error& /*failure*/) {}
};

class HeartbeatMonitor final : public RankLiveness {
 public:
  // A rank from which nothing came for `seconds` is silent. `on_failure` is told of a first sign of failure.
  HeartbeatMonitor(int rank, double seconds, std::function<void(const Error&)> on_failure);

  // From here on signs are exchanged. `hosts`: of all ranks.
  void start(std::unique_ptr<HeartbeatChannel> channel, std::vector<std::string> hosts);
  // The last sign of every rank goes to all, so nothing is left on its way. Collective; throws kPeer for ranks that
  // have fallen silent.
  void leave();

  bool others_are_working(double seconds) const override;
  double detection_seconds() const override { return started_ ? 2.0 * interval_ : 0.0; }
  void on_failure(const Error& error) noexcept override;

 private:
  struct Peer {
    double silence = 0.0;
    bool left = false;
    Clock::time_point last_work;
    bool told = false;  // that this rank leaves
  };

  void on_heartbeat() override;
  void receive();
  void send(Heartbeat heartbeat);
  void add_silence();

  const double seconds_;
  const double interval_;
  const std::function<void(const Error&)> on_failure_;
  bool started_ = false;
  std::unique_ptr<HeartbeatChannel> channel_;
  RankNames names_;
  Clock::time_point last_;   // on_heartbeat
  Clock::time_point told_;   // of the last heartbeat sent
  std::vector<Peer> peers_;  // [ranks]
};

}  // namespace ringattn
