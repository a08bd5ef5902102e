// SPDX-License-Identifier: Apache-2.0
// Worlds of device transports whose control is tcp, for the conformance suite: without MPI.
#include <memory>

#include "tests/comm/device_worlds.hpp"
#include "tests/comm/store_control.hpp"

namespace ringattn::testing {

std::vector<WorldCase> world_cases() {
  const StoreRank mine = store_rank();
  return device_world_cases(mine.rank, mine.size, [](const MakeWorld& make, const RankMain& rank_main) {
    std::unique_ptr<Transport> world;
    return sync_after(world, [&] {
      world = make(make_tcp_transport(store_control()));
      return rank_main(*world);
    });
  });
}

}  // namespace ringattn::testing
