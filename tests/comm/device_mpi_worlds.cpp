// SPDX-License-Identifier: Apache-2.0
// Worlds of device transports under mpirun for the conformance suite.
#include <exception>
#include <memory>

#include "comm/mpi.hpp"
#include "tests/comm/device_worlds.hpp"

namespace ringattn::testing {

std::vector<WorldCase> world_cases() {
  int rank = 0, ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  return device_world_cases(rank, ranks, [](const MakeWorld& make, const RankMain& rank_main) {
    const std::unique_ptr<Transport> control = make_mpi_transport(MPI_COMM_WORLD);
    int mine = 0;
    std::exception_ptr failure;
    std::unique_ptr<Transport> world;
    try {
      world = make(control->split_world(control->size(), Deadline::after(20.0)));
      mine = rank_main(*world);
    } catch (...) {
      failure = std::current_exception();
    }
    int sum = 0;
    MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    world.reset();
    if (failure != nullptr) std::rethrow_exception(failure);
    return sum;
  });
}

}  // namespace ringattn::testing
