// SPDX-License-Identifier: Apache-2.0
// Reads what a launcher (mpirun, srun) tells the processes that it starts through their environment. It works before
// MPI is initialized, and without MPI.
#pragma once

#include <optional>

namespace ringattn {

// Returns true if mpirun or srun started this process with MPI.
bool launched_by_mpi();

// This process's rank, the number of ranks, and the number of ranks on this host, as the launcher says. Nothing if it
// doesn't say.
std::optional<int> launched_rank();
std::optional<int> launched_ranks();
std::optional<int> launched_local_ranks();

// Returns true if this process is one of several ranks of one world: of MPI, or at the store (comm/store_rank.hpp).
bool launched_as_rank();

// Returns true if this process prints for the job while its ranks are not connected. That is rank 0, or a process that
// will not connect to others, such as a program without MPI under srun.
bool prints_for_launcher();

}  // namespace ringattn
