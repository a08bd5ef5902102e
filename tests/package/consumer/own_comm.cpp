// SPDX-License-Identifier: Apache-2.0
// The job under an MPI_Comm of the caller's own: all ranks of the world but the first, in another order.
#include <cstdio>

#include "comm/mpi.hpp"
#include "job.hpp"

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm mine;
  MPI_Comm_split(MPI_COMM_WORLD, rank == 0 ? MPI_UNDEFINED : 0, -rank, &mine);
  if (mine != MPI_COMM_NULL) {
    Sum sum, all;
    int my_rank = 0;
    {
      const auto transport = ringattn::make_mpi_transport(mine);
      sum = run_job(*transport);
      my_rank = transport->rank();
    }
    MPI_Reduce(&sum, &all, 2, MPI_UINT64_T, MPI_SUM, 0, mine);
    if (my_rank == 0) {
      std::printf("%016llx%016llx\n", static_cast<unsigned long long>(all.high),
                  static_cast<unsigned long long>(all.low));
    }
    MPI_Comm_free(&mine);
  }
  MPI_Finalize();
}
