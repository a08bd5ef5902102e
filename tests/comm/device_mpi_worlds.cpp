// SPDX-License-Identifier: Apache-2.0
// Worlds of device transports under mpirun for the conformance suite: one process a GPU.
#include <fmt/format.h>

#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "base/cuda.hpp"
#include "base/gpu.hpp"
#include "comm/mpi.hpp"
#if defined(RINGATTN_TEST_NCCL)
#include "comm/nccl.hpp"
#endif
#include "comm/p2p/p2p.hpp"
#include "tests/comm/memory.hpp"
#include "tests/comm/world_cases.hpp"

namespace ringattn {

namespace {

using Make = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport> control, int device)>;

WorldCase device_case(std::string name, const Make& make) {
  const auto run = [=](const std::function<int(Transport&)>& rank_main) {
    const std::unique_ptr<Transport> control = make_mpi_transport(MPI_COMM_WORLD);
    const int device = control->rank();  // all ranks are on this host: see below
    const DeviceGuard guard(device);
    const CudaStream stream;
    rank_stream() = Stream{stream.get()};
    int mine = 0;
    std::exception_ptr failure;
    std::unique_ptr<Transport> world;
    try {
      world = make(control->split(control->size(), Deadline::after(20.0)), device);
      mine = rank_main(*world);
    } catch (...) {
      failure = std::current_exception();
    }
    // The ranks meet before a world's communicators go: a failed rank's messages may still be on their way.
    int sum = 0;
    MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    world.reset();
    if (failure != nullptr) std::rethrow_exception(failure);
    return sum;
  };
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
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
