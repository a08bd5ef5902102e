// SPDX-License-Identifier: Apache-2.0
// A liveness that counts its heartbeats, for tests that long work sends them.
#pragma once

#include <atomic>

#include "base/rank_liveness.hpp"

namespace ringattn::testing {

class CountingLiveness final : public RankLiveness {
 public:
  CountingLiveness() : RankLiveness(0) {}

  int heartbeats() const { return heartbeats_; }

 private:
  void on_heartbeat() override { ++heartbeats_; }

  std::atomic<int> heartbeats_{0};
};

}  // namespace ringattn::testing
