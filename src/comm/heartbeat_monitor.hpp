// SPDX-License-Identifier: Apache-2.0
// Heartbeats between ranks that are processes. A rank's monitor sends heartbeats to all other ranks, receives theirs,
// and detects a silent rank while this one computes, reads, writes or waits. Only the rank's own thread sends
// heartbeats, so a rank that hangs is as silent as one that is stopped, killed or disconnected.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/rank_liveness.hpp"
#include "comm/failure.hpp"

namespace ringattn {

enum class Heartbeat : char { kWaiting = 'w', kWorking = 'b', kLeaving = 'l' };

// Carries heartbeats between ranks.
class HeartbeatChannel {
 public:
  virtual ~HeartbeatChannel() = default;

  // Calls `heard` for each heartbeat that has arrived, in the order in which its rank sent it. Equal heartbeats may be
  // merged.
  virtual void receive(const std::function<void(int, Heartbeat)>& heard) = 0;
  // Sends one heartbeat to a peer. Returns false if the peer accepts none at the moment. The number in flight to a peer
  // is bounded.
  virtual bool send(int peer, Heartbeat heartbeat) = 0;
  // Called when ranks have fallen silent. If the channel shares its transport's context, every later call of the world
  // throws `failure` at once, because the handler of the first error may start another collective.
  virtual void give_up(const Error& /*failure*/) {}
};

class HeartbeatMonitor final : public RankLiveness {
 public:
  // A rank is silent after `seconds` without a heartbeat. `on_failure` is called when this rank is about to fail.
  HeartbeatMonitor(int rank, double seconds, std::function<void(const Error&)> on_failure);

  // Starts the exchange of heartbeats. `hosts`: [ranks].
  void start(std::unique_ptr<HeartbeatChannel> channel, std::vector<std::string> hosts);
  // Exchanges a last heartbeat with every rank, so that none is left in flight. Collective. Throws kPeer for ranks that
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
    bool leave_sent = false;  // it knows that this rank leaves
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
  Clock::time_point last_check_;  // last check of the peers
  Clock::time_point last_sent_;   // last heartbeat sent
  std::vector<Peer> peers_;       // [ranks]
};

}  // namespace ringattn
