// SPDX-License-Identifier: Apache-2.0
/* The same job on the ranks of MPI_COMM_WORLD. */
#include <mpi.h>

#include "client_job.h"

int main(int argc, char** argv) {
  static float all_out[sizeof out / sizeof *out], all_lse[sizeof lse / sizeof *lse];
  ringattn_world_options where;
  memset(&where, 0, sizeof where);
  where.size = sizeof where;
  where.abi = RINGATTN_ABI;
  ringattn_world* world = NULL;
  int provided = 0, ranks = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  MPI_Comm communicator = MPI_COMM_WORLD;
  MPI_Comm_size(communicator, &ranks);
  if (ringattn_world_mpi(&where, &communicator, &world) != RINGATTN_OK) MPI_Abort(communicator, refused("world"));
  const int rank = ringattn_world_rank(world);
  if (ringattn_world_size(world) != ranks || run_rank(world) != 0) MPI_Abort(communicator, 1);
  ringattn_world_destroy(world);
  /* Each row is one rank's, the others have zero bytes there. */
  MPI_Reduce(out, all_out, (int)sizeof out, MPI_BYTE, MPI_BOR, 0, communicator);
  MPI_Reduce(lse, all_lse, (int)sizeof lse, MPI_BYTE, MPI_BOR, 0, communicator);
  memcpy(out, all_out, sizeof out);
  memcpy(lse, all_lse, sizeof lse);
  if (rank == 0) print_bits();
  MPI_Finalize();
  return 0;
}
