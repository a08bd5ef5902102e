// SPDX-License-Identifier: Apache-2.0
// For gtest programs whose processes are ranks that meet at RINGATTN_STORE (tests/support/store_ranks.py starts them):
// the world in which they meet between tests, and from which each test makes its own.
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "comm/store_rank.hpp"
#include "comm/tcp/store.hpp"
#include "comm/tcp/tcp.hpp"

namespace ringattn::testing {

inline Transport& store_control() {
  static const std::unique_ptr<Transport> world = [] {
    const StoreRank mine = store_rank();
    return make_tcp_transport(*make_store({mine.address, mine.rank, mine.size, mine.job, 60.0}));
  }();
  return *world;
}

// The sum of what all ranks' `play` return. They synchronize before the resources of `play` in `world` are released; a
// failure is rethrown after that.
template <typename World, typename Play>
int sync_after(std::unique_ptr<World>& world, const Play& play) {
  int mine = 0;
  std::exception_ptr failure;
  try {
    mine = play();
  } catch (...) {
    failure = std::current_exception();
  }
  int sum = 0;
  for (const std::string& theirs : store_control().all_gather(std::to_string(mine), Deadline::after(60.0))) {
    sum += std::stoi(theirs);
  }
  world.reset();
  if (failure != nullptr) std::rethrow_exception(failure);
  return sum;
}

}  // namespace ringattn::testing
