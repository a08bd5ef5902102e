// SPDX-License-Identifier: Apache-2.0
#include "comm/heartbeat_monitor.hpp"

#include <algorithm>
#include <thread>
#include <utility>

#include "comm/timeouts.hpp"

namespace ringattn {

namespace {

double seconds_since(RankLiveness::Clock::time_point then, RankLiveness::Clock::time_point now) {
  return std::chrono::duration<double>(now - then).count();
}

}  // namespace

HeartbeatMonitor::HeartbeatMonitor(int rank, double seconds, std::function<void(const Error&)> on_failure)
    : RankLiveness(rank),
      seconds_(seconds),
      interval_(std::clamp(seconds / 8.0, 0.005, 0.5)),
      on_failure_(std::move(on_failure)) {}

void HeartbeatMonitor::start(std::unique_ptr<HeartbeatChannel> channel, std::vector<std::string> hosts) {
  channel_ = std::move(channel);
  peers_.resize(hosts.size());
  names_ = RankNames(std::move(hosts));
  last_check_ = Clock::now();
  started_ = peers_.size() > 1;
}

void HeartbeatMonitor::on_failure(const Error& error) noexcept { on_failure_(error); }

bool HeartbeatMonitor::others_are_working(double seconds) const {
  const auto now = Clock::now();
  return started_ && std::any_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
           return peer.last_work != Clock::time_point() &&
                  seconds_since(peer.last_work, now) <= std::min(seconds, seconds_) + detection_seconds();
         });
}

void HeartbeatMonitor::on_heartbeat() {
  if (!started_ || seconds_since(last_check_, Clock::now()) < interval_) return;
  receive();
  send(last_work() > last_sent_ ? Heartbeat::kWorking : Heartbeat::kWaiting);
  last_sent_ = Clock::now();
  add_silence();
}

void HeartbeatMonitor::receive() {
  channel_->receive([this](int rank, Heartbeat heartbeat) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    peer.silence = 0.0;
    if (heartbeat == Heartbeat::kWorking) peer.last_work = Clock::now();
    if (heartbeat == Heartbeat::kLeaving) peer.left = true;
  });
}

void HeartbeatMonitor::send(Heartbeat heartbeat) {
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    if (static_cast<int>(i) == rank() || peers_[i].leave_sent) continue;
    peers_[i].leave_sent = channel_->send(static_cast<int>(i), heartbeat) && heartbeat == Heartbeat::kLeaving;
  }
}

void HeartbeatMonitor::add_silence() {
  const auto now = Clock::now();
  // While this rank was stopped itself, or did not poll, it could not hear any rank.
  const double passed = std::min(seconds_since(last_check_, now), seconds_ / 2.0);
  last_check_ = now;
  std::vector<int> silent;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    if (static_cast<int>(i) == rank() || peer.left) continue;
    peer.silence += passed;
    if (peer.silence > seconds_) silent.push_back(static_cast<int>(i));
  }
  if (silent.empty()) return;
  // Also name ranks that fell silent at the same time but whose last heartbeat arrived slightly later.
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const bool nearly = !peers_[i].left && peers_[i].silence > seconds_ - 2.0 * interval_;
    if (nearly && static_cast<int>(i) != rank() && peers_[i].silence <= seconds_) silent.push_back(static_cast<int>(i));
  }
  std::sort(silent.begin(), silent.end());
  started_ = false;
  const Error failure = silent_error(names_, silent, seconds_);
  channel_->give_up(failure);
  fail_rank(failure);
}

void HeartbeatMonitor::leave() {
  if (!started_) {
    channel_.reset();
    return;
  }
  peers_[static_cast<std::size_t>(rank())].left = true;
  const Deadline enough = Timeouts::grace(seconds_);  // for a rank that has left and receives nothing any more
  for (;;) {
    receive();
    send(Heartbeat::kLeaving);
    const bool all_left = std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.left; });
    const bool all_told = std::all_of(peers_.begin(), peers_.end(), [this](const Peer& peer) {
      return peer.leave_sent || &peer == &peers_[static_cast<std::size_t>(rank())];
    });
    if (all_left && (all_told || enough.expired())) break;
    waiting_heartbeat();
    std::this_thread::yield();
  }
  started_ = false;
  channel_.reset();
}

}  // namespace ringattn
