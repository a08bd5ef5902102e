// SPDX-License-Identifier: Apache-2.0
// Worlds of device transports whose control is tcp, for the conformance suite: one process a GPU, without MPI.
#include <fmt/format.h>

#include <functional>
#include <utility>

#include "base/cuda.hpp"
#include "base/gpu.hpp"
#if defined(RINGATTN_TEST_NCCL)
#include "comm/nccl.hpp"
#endif
#include "comm/p2p/p2p.hpp"
#include "tests/comm/memory.hpp"
#include "tests/comm/store_meeting.hpp"
#include "tests/comm/world_cases.hpp"

namespace ringattn {

namespace {

using Make = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport> control, int device)>;

WorldCase device_case(std::string name, const Make& make) {
  const auto run = [=](const std::function<int(Transport&)>& rank_main) {
    const int device = store_meeting().rank();  // all ranks are on this host: see below
    const DeviceGuard guard(device);
    const CudaStream stream;
    rank_stream() = Stream{stream.get()};
    std::unique_ptr<Transport> world;
    return meet_after(world, [&] {
      world = make(make_tcp_transport(store_meeting()), device);
      return rank_main(*world);
    });
  };
  const int ranks = store_rank().size;
  const auto gpus = static_cast<int>(visible_gpus().size());
  const std::string needs = gpus >= ranks ? "" : fmt::format("{} GPUs on this host, which has {}", ranks, gpus);
  return {std::move(name), run, MemoryKind::kDevice, needs};
}

}  // namespace

std::vector<WorldCase> world_cases() {
  std::vector<WorldCase> cases;
  cases.push_back(device_case("p2p", [](std::unique_ptr<Transport> control, int device) {
    return make_p2p_transport(std::move(control), device);
  }));
#if defined(RINGATTN_TEST_NCCL)
  cases.push_back(device_case("nccl", [](std::unique_ptr<Transport> control, int device) {
    return make_nccl_transport(std::move(control), device);
  }));
#endif
  return cases;
}

}  // namespace ringattn
