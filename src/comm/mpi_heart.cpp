// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_heart.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include "comm/failure.hpp"

namespace ringattn {

namespace {

constexpr int kTag = 1;
// Eager in every MPI, and enough for any host's name.
constexpr std::size_t kMostBytes = 256;

double seconds_since(Pulse::Clock::time_point then, Pulse::Clock::time_point now) {
  return std::chrono::duration<double>(now - then).count();
}

}  // namespace

MpiHeart::MpiHeart(int rank, double seconds, std::function<void(const Error&)> failing)
    : Pulse(rank), seconds_(seconds), interval_(std::clamp(seconds / 8.0, 0.005, 0.5)), failing_(std::move(failing)) {}

void MpiHeart::start(std::string host) {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  // What goes wrong with a sign shows as silence.
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  host_ = host.substr(0, kMostBytes - 1);
  peers_.resize(static_cast<std::size_t>(size));
  last_ = Clock::now();
  beating_ = size > 1;
}

void MpiHeart::failing(const Error& error) noexcept { failing_(error); }

bool MpiHeart::others_work() const {
  const auto now = Clock::now();
  return beating_ && std::any_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
           return peer.worked != Clock::time_point() && seconds_since(peer.worked, now) <= seconds_;
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
    std::array<char, kMostBytes> bytes;
    int count = 0;
    MPI_Get_count(&status, MPI_CHAR, &count);
    if (MPI_Mrecv(bytes.data(), static_cast<int>(bytes.size()), MPI_CHAR, &message, MPI_STATUS_IGNORE) != MPI_SUCCESS ||
        count < 1) {
      continue;
    }
    Peer& peer = peers_[static_cast<std::size_t>(status.MPI_SOURCE)];
    peer.host.assign(bytes.data() + 1, static_cast<std::size_t>(count - 1));
    peer.silence = 0.0;
    if (bytes[0] == kWorks) peer.worked = Clock::now();
    if (bytes[0] == kLeaves) peer.left = true;
  }
}

void MpiHeart::tell(Sign sign) {
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    if (static_cast<int>(i) == rank() || peer.told) continue;
    // A peer that takes nothing gets no more: what is on its way to it stays bounded.
    int sent = 0;
    if (MPI_Test(&peer.sending, &sent, MPI_STATUS_IGNORE) != MPI_SUCCESS || sent == 0) continue;
    peer.sign = static_cast<char>(sign) + host_;
    const int result = MPI_Isend(peer.sign.data(), static_cast<int>(peer.sign.size()), MPI_CHAR, static_cast<int>(i),
                                 kTag, MPI_COMM_WORLD, &peer.sending);
    peer.told = result == MPI_SUCCESS && sign == kLeaves;
  }
}

void MpiHeart::add_silence() {
  const auto now = Clock::now();
  // While this rank was stopped itself, or didn't look, it could hear nobody.
  const double passed = std::min(seconds_since(last_, now), seconds_ / 2.0);
  last_ = now;
  std::vector<std::string> hosts;
  std::vector<int> silent;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    hosts.push_back(peer.host);
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
  hosts[static_cast<std::size_t>(rank())] = host_;
  const bool heard_of_all = std::none_of(hosts.begin(), hosts.end(), [](const auto& host) { return host.empty(); });
  const RankNames names = heard_of_all ? RankNames(std::move(hosts)) : RankNames();
  fail_with_pulse(silent_error(names, silent, seconds_));
}

void MpiHeart::part() {
  if (!beating_) return;
  peers_[static_cast<std::size_t>(rank())].left = true;
  for (;;) {
    hear();
    tell(kLeaves);
    const bool all_left = std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.left; });
    const bool all_told = std::all_of(peers_.begin(), peers_.end(), [this](const Peer& peer) {
      return peer.told || &peer == &peers_[static_cast<std::size_t>(rank())];
    });
    if (all_left && all_told) break;
    look();
    std::this_thread::yield();
  }
  beating_ = false;
}

}  // namespace ringattn
