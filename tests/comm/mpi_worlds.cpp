// SPDX-License-Identifier: Apache-2.0
// Worlds of mpirun for the conformance suite.
#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "comm/mpi.hpp"
#include "comm/paced.hpp"
#include "tests/comm/world_cases.hpp"

namespace ringattn::testing {

namespace {

WorldCase mpi_case(std::string name, const MpiOptions& options, double pace) {
  const auto run = [=](const std::function<int(Transport&)>& rank_main) {
    int mine = 0;
    std::exception_ptr failure;
    try {
      std::unique_ptr<Transport> world = make_mpi_transport(MPI_COMM_WORLD, options);
      if (pace > 0.0) world = make_paced_transport(std::move(world), pace);
      mine = rank_main(*world);
    } catch (...) {
      failure = std::current_exception();
    }
    int sum = 0;
    MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);  // the ranks meet before the next test
    if (failure != nullptr) std::rethrow_exception(failure);
    return sum;
  };
  return {std::move(name), run};
}

}  // namespace

std::vector<WorldCase> world_cases() {
  MpiOptions small;
  small.route = Route::kDirect;
  small.request_bytes = 100'000;  // large messages of the suite need several, each beyond eager limits
  small.max_exchanges = 8;        // tags come round
  return {mpi_case("mpi", {}, 0.0), mpi_case("small_requests", small, 0.0), mpi_case("paced", {}, 1e9)};
}

}  // namespace ringattn::testing
