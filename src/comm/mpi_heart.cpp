// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_heart.hpp"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/deadline.hpp"

namespace ringattn {

namespace {

constexpr int kTag = 1;

double seconds_since(Pulse::Clock::time_point then, Pulse::Clock::time_point now) {
  return std::chrono::duration<double>(now - then).count();
}

}  // namespace

MpiHeart::MpiHeart(int rank, double seconds, std::function<void(const Error&)> failing)
    : Pulse(rank), seconds_(seconds), interval_(std::clamp(seconds / 8.0, 0.005, 0.5)), failing_(std::move(failing)) {}

void MpiHeart::start(std::vector<std::string> hosts) {
  // What goes wrong with a sign shows as silence.
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  peers_.resize(hosts.size());
  names_ = RankNames(std::move(hosts));
  last_ = Clock::now();
  beating_ = peers_.size() > 1;
}

void MpiHeart::failing(const Error& error) noexcept { failing_(error); }

bool MpiHeart::others_work(double seconds) const {
  const auto now = Clock::now();
  return beating_ && std::any_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
           return peer.worked != Clock::time_point() && seconds_since(peer.worked, now) <= std::min(seconds, seconds_);
         });
}

void MpiHeart::exchange() {
  if (!beating_ || seconds_since(last_, Clock::now()) < interval_) return;
  hear();
  tell(worked() > told_ ? kWorks : kWaits);
  told_ = Clock::now();
  add_silence();
}

void MpiHeart::hear() {
  for (;;) {
    int found = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    if (MPI_Improbe(MPI_ANY_SOURCE, kTag, MPI_COMM_WORLD, &found, &message, &status) != MPI_SUCCESS || found == 0) {
      return;
    }
    char sign = kWaits;
    if (MPI_Mrecv(&sign, 1, MPI_CHAR, &message, MPI_STATUS_IGNORE) != MPI_SUCCESS) continue;
    Peer& peer = peers_[static_cast<std::size_t>(status.MPI_SOURCE)];
    peer.silence = 0.0;
    if (sign == kWorks) peer.worked = Clock::now();
    if (sign == kLeaves) peer.left = true;
  }
}

void MpiHeart::tell(Sign sign) {
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    if (static_cast<int>(i) == rank() || peer.told) continue;
    // A peer that takes nothing gets no more: what is on its way to it stays bounded.
    int sent = 0;
    if (MPI_Test(&peer.sending, &sent, MPI_STATUS_IGNORE) != MPI_SUCCESS || sent == 0) continue;
    peer.sign = sign;
    const int result = MPI_Isend(&peer.sign, 1, MPI_CHAR, static_cast<int>(i), kTag, MPI_COMM_WORLD, &peer.sending);
    peer.told = result == MPI_SUCCESS && sign == kLeaves;
  }
}

void MpiHeart::add_silence() {
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
  fail_with_pulse(silent_error(names_, silent, seconds_));
}

void MpiHeart::part() {
  if (!beating_) return;
  peers_[static_cast<std::size_t>(rank())].left = true;
  const Deadline enough = Deadline::after(seconds_);  // for a rank that has left and takes nothing any more
  for (;;) {
    hear();
    tell(kLeaves);
    const bool all_left = std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.left; });
    const bool all_told = std::all_of(peers_.begin(), peers_.end(), [this](const Peer& peer) {
      return peer.told || &peer == &peers_[static_cast<std::size_t>(rank())];
    });
    if (all_left && (all_told || enough.expired())) break;
    look();
    std::this_thread::yield();
  }
  beating_ = false;
}

}  // namespace ringattn
