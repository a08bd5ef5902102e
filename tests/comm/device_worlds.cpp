// SPDX-License-Identifier: Apache-2.0
#include "tests/comm/device_worlds.hpp"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "base/cuda.hpp"
#include "base/gpu.hpp"
#if defined(RINGATTN_TEST_NCCL)
#include "comm/nccl.hpp"
#endif
#include "comm/p2p/p2p.hpp"
#include "tests/comm/memory.hpp"

namespace ringattn::testing {

std::vector<WorldCase> device_world_cases(int rank, int ranks, const PlayRank& play) {
  using Make = std::unique_ptr<Transport> (*)(std::unique_ptr<Transport> control, int device);
  const auto gpus = static_cast<int>(visible_gpus().size());
  const std::string needs = gpus >= ranks ? "" : fmt::format("{} GPUs on this host, which has {}", ranks, gpus);
  std::vector<WorldCase> cases;
  const auto add = [&](const char* name, Make make) {
    const auto run = [=](const RankMain& rank_main) {
      const DeviceGuard guard(rank);
      const CudaStream stream;
      rank_stream() = Stream{stream.get()};
      return play([&](std::unique_ptr<Transport> control) { return make(std::move(control), rank); }, rank_main);
    };
    cases.push_back({name, run, MemoryKind::kDevice, needs});
  };
  add("p2p",
      [](std::unique_ptr<Transport> control, int device) { return make_p2p_transport(std::move(control), device); });
#if defined(RINGATTN_TEST_NCCL)
  add("nccl",
      [](std::unique_ptr<Transport> control, int device) { return make_nccl_transport(std::move(control), device); });
#endif
  return cases;
}

}  // namespace ringattn::testing
