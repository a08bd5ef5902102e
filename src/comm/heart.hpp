// SPDX-License-Identifier: Apache-2.0
// The pulse of a rank that is a process: it tells all other ranks that it goes on, hears the same of them, and so tells
// silence from work wherever a rank computes, reads, writes or waits. Only the rank's own thread gives signs: a rank
// that hangs is as silent as one that is stopped, killed or cut off.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/pulse.hpp"
#include "comm/failure.hpp"

namespace ringattn {

enum class Sign : char { kWaits = 'w', kWorks = 'b', kLeaves = 'l' };

// What carries signs between ranks.
class Signs {
 public:
  virtual ~Signs() = default;

  // Hands over what has come, by rank, in the order in which each has given them. Of equal ones, one is enough.
  virtual void hear(const std::function<void(int, Sign)>& heard) = 0;
  // Gives one to a peer; false where it takes none at this moment. What is on its way to a peer stays bounded.
  virtual bool tell(int peer, Sign sign) = 0;
  // Ranks have fallen silent. Where the world can be told so, every later call of it throws `failure` at once: whoever
  // handles the first one may want to meet.
  virtual void give_up(const Error& /*failure*/) {}
};

class Heart final : public Pulse {
 public:
  // A rank from which nothing came for `seconds` is silent. `failing` is told of a first sign of failure.
  Heart(int rank, double seconds, std::function<void(const Error&)> failing);

  // From here on signs are exchanged. `hosts`: of all ranks.
  void start(std::unique_ptr<Signs> signs, std::vector<std::string> hosts);
  // The last sign of every rank goes to all, so nothing is left on its way. Collective; throws kPeer for ranks that
  // have fallen silent.
  void part();

  bool others_work(double seconds) const override;
  double noticing_seconds() const override { return beating_ ? 2.0 * interval_ : 0.0; }
  void failing(const Error& error) noexcept override;

 private:
  struct Peer {
    double silence = 0.0;
    bool left = false;
    Clock::time_point worked;
    bool told = false;  // that this rank leaves
  };

  void exchange() override;
  void hear();
  void tell(Sign sign);
  void add_silence();

  const double seconds_;
  const double interval_;
  const std::function<void(const Error&)> failing_;
  bool beating_ = false;
  std::unique_ptr<Signs> signs_;
  RankNames names_;
  Clock::time_point last_;   // exchange
  Clock::time_point told_;   // of the last sign sent
  std::vector<Peer> peers_;  // [ranks]
};

}  // namespace ringattn
