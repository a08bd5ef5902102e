// SPDX-License-Identifier: Apache-2.0
#include "comm/heart.hpp"

#include <algorithm>
#include <thread>
#include <utility>

#include "comm/patience.hpp"

namespace ringattn {

namespace {

double seconds_since(Pulse::Clock::time_point then, Pulse::Clock::time_point now) {
  return std::chrono::duration<double>(now - then).count();
}

}  // namespace

Heart::Heart(int rank, double seconds, std::function<void(const Error&)> failing)
    : Pulse(rank), seconds_(seconds), interval_(std::clamp(seconds / 8.0, 0.005, 0.5)), failing_(std::move(failing)) {}

void Heart::start(std::unique_ptr<Signs> signs, std::vector<std::string> hosts) {
  signs_ = std::move(signs);
  peers_.resize(hosts.size());
  names_ = RankNames(std::move(hosts));
  last_ = Clock::now();
  beating_ = peers_.size() > 1;
}

void Heart::failing(const Error& error) noexcept { failing_(error); }

bool Heart::others_work(double seconds) const {
  const auto now = Clock::now();
  return beating_ && std::any_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
           return peer.worked != Clock::time_point() &&
                  seconds_since(peer.worked, now) <= std::min(seconds, seconds_) + noticing_seconds();
         });
}

void Heart::exchange() {
  if (!beating_ || seconds_since(last_, Clock::now()) < interval_) return;
  hear();
  tell(worked() > told_ ? Sign::kWorks : Sign::kWaits);
  told_ = Clock::now();
  add_silence();
}

void Heart::hear() {
  signs_->hear([this](int rank, Sign sign) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    peer.silence = 0.0;
    if (sign == Sign::kWorks) peer.worked = Clock::now();
    if (sign == Sign::kLeaves) peer.left = true;
  });
}

void Heart::tell(Sign sign) {
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    if (static_cast<int>(i) == rank() || peers_[i].told) continue;
    peers_[i].told = signs_->tell(static_cast<int>(i), sign) && sign == Sign::kLeaves;
  }
}

void Heart::add_silence() {
  const auto now = Clock::now();
  // While this rank was stopped itself, or didn't look, it could hear nobody.
  const double passed = std::min(seconds_since(last_, now), seconds_ / 2.0);
  last_ = now;
  std::vector<int> silent;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    if (static_cast<int>(i) == rank() || peer.left) continue;
    peer.silence += passed;
    if (peer.silence > seconds_) silent.push_back(static_cast<int>(i));
  }
  if (silent.empty()) return;
  // Who fell silent at the same time is named too, be it that its last sign came a moment later.
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const bool nearly = !peers_[i].left && peers_[i].silence > seconds_ - 2.0 * interval_;
    if (nearly && static_cast<int>(i) != rank() && peers_[i].silence <= seconds_) silent.push_back(static_cast<int>(i));
  }
  std::sort(silent.begin(), silent.end());
  beating_ = false;
  const Error failure = silent_error(names_, silent, seconds_);
  signs_->give_up(failure);
  fail_with_pulse(failure);
}

void Heart::part() {
  if (!beating_) {
    signs_.reset();
    return;
  }
  peers_[static_cast<std::size_t>(rank())].left = true;
  const Deadline enough = Patience::grace(seconds_);  // for a rank that has left and takes nothing any more
  for (;;) {
    hear();
    tell(Sign::kLeaves);
    const bool all_left = std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.left; });
    const bool all_told = std::all_of(peers_.begin(), peers_.end(), [this](const Peer& peer) {
      return peer.told || &peer == &peers_[static_cast<std::size_t>(rank())];
    });
    if (all_left && (all_told || enough.expired())) break;
    look();
    std::this_thread::yield();
  }
  beating_ = false;
  signs_.reset();
}

}  // namespace ringattn
