// SPDX-License-Identifier: Apache-2.0
// Determines this process's rank and world if RINGATTN_STORE requests a world without MPI. The rank comes from the
// environment variables of torchrun, Slurm or mpirun.
#pragma once

#include <string>

#include "comm/tcp/store.hpp"

namespace ringattn {

struct StoreRank {
  StoreAddress address;
  int rank = 0;
  int size = 1;
  std::string job;  // RINGATTN_JOB, else torchrun's or Slurm's name of the job; empty if there is none
};

// Returns true if RINGATTN_STORE is set.
bool store_requested();

// Throws kUsage, naming the variable, for a value that is missing, not a number, or contradictory.
StoreRank store_rank();

}  // namespace ringattn
