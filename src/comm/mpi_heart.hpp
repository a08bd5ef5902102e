// SPDX-License-Identifier: Apache-2.0
// The pulse of a rank under MPI: it tells all other ranks that it goes on, hears the same of them, and so tells silence
// from work wherever a rank computes, reads, writes or waits. Only the rank's own thread sends: a rank that hangs is as
// silent as one that is stopped, killed or cut off.
#pragma once

#include <mpi.h>

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "base/pulse.hpp"
#include "comm/failure.hpp"

namespace ringattn {

class MpiHeart final : public Pulse {
 public:
  // A rank from which nothing came for `seconds` is silent. `failing` is told of a first sign of failure.
  MpiHeart(int rank, double seconds, std::function<void(const Error&)> failing);

  // From here on signs are exchanged, over MPI_COMM_WORLD: MPI is initialised, and nobody else uses its tag there.
  // `hosts`: of all ranks.
  void start(std::vector<std::string> hosts);
  // The last sign of every rank goes to all, so nothing is left on its way. Collective; throws kPeer for ranks that
  // have fallen silent.
  void part();

  bool others_work(double seconds) const override;
  void failing(const Error& error) noexcept override;

 private:
  enum Sign : char { kWaits = 'w', kWorks = 'b', kLeaves = 'l' };

  struct Peer {
    double silence = 0.0;
    bool left = false;
    Clock::time_point worked;
    MPI_Request sending = MPI_REQUEST_NULL;
    char sign = kWaits;  // belongs to `sending`
    bool told = false;   // that this rank leaves
  };

  void exchange() override;
  void hear();
  void tell(Sign sign);
  void add_silence();

  const double seconds_;
  const double interval_;
  const std::function<void(const Error&)> failing_;
  bool beating_ = false;
  RankNames names_;
  Clock::time_point last_;  // exchange
  Clock::time_point told_;  // of the last sign sent
  std::deque<Peer> peers_;  // [ranks]; requests and signs stay where they are
};

}  // namespace ringattn
