// SPDX-License-Identifier: Apache-2.0
// What a launcher (mpirun, srun) tells the processes that it starts, read from the environment: before MPI is
// initialised, or without it.
#pragma once

#include <optional>

namespace ringattn {

// Whether this process was started by mpirun or srun with MPI.
bool launched_by_mpi();

// This process's rank among those that the launcher has started, their number, and the number of those on this host;
// nothing where it doesn't say.
std::optional<int> launched_rank();
std::optional<int> launched_ranks();
std::optional<int> launched_ranks_here();

// Whether this process is one of several that are ranks of one world: of MPI, or at the store (comm/store_rank.hpp).
bool launched_as_rank();

// Whether this process speaks for the job while its ranks don't know each other: rank 0, or one that will not meet
// others, such as a program without MPI that srun or a script under it has started.
bool prints_for_launcher();

}  // namespace ringattn
