// SPDX-License-Identifier: Apache-2.0
// Worlds of transport p2p inside this process for the conformance suite: the ranks are threads that share the GPUs.
#include <fmt/format.h>

#include <atomic>
#include <utility>

#include "base/cuda.hpp"
#include "base/gpu.hpp"
#include "comm/p2p/p2p.hpp"
#include "comm/threads.hpp"
#include "tests/comm/exchanges.hpp"
#include "tests/comm/world_cases.hpp"

namespace ringattn::testing {

namespace {

// `own_streams`: each rank works on a stream of its own; else all of a device on its legacy default stream.
WorldCase p2p_case(const std::string& name, int size, const P2pOptions& options, bool own_streams) {
  const auto run = [=](const std::function<int(Transport&)>& rank_main) {
    std::atomic<int> sum{0};
    run_threads_world(size, {}, [&](Transport& host) {
      const int device = host.rank() % static_cast<int>(visible_gpus().size());
      const DeviceGuard guard(device);
      const CudaStream stream;
      rank_stream() = own_streams ? Stream{stream.get()} : Stream{};
      const std::unique_ptr<Transport> world =
          make_p2p_transport(host.split_world(size, test_deadline()), device, options);
      sum += rank_main(*world);
    });
    return sum.load();
  };
  const std::string why = gpus_unavailable();
  return {fmt::format("{}_{}", name, size), run, MemoryKind::kDevice,
          why.empty() ? why : fmt::format("a GPU: {}", why)};
}

}  // namespace

std::vector<WorldCase> world_cases() {
  std::vector<WorldCase> cases;
  for (const int size : {1, 2, 3, 4, 7}) cases.push_back(p2p_case("p2p", size, {}, true));
  for (const int size : {2, 4}) cases.push_back(p2p_case("legacy", size, {}, false));
  P2pOptions lanes;
  lanes.lanes = 1;
  cases.push_back(p2p_case("one_lane", 3, lanes, true));
  lanes.lanes = 4;
  cases.push_back(p2p_case("four_lanes", 2, lanes, true));
  return cases;
}

}  // namespace ringattn::testing
