// SPDX-License-Identifier: Apache-2.0
// Which rank of which world this process is, where RINGATTN_STORE asks for one without MPI: read from what torchrun,
// Slurm or an mpirun has put into the environment.
#pragma once

#include <string>

#include "comm/tcp/store.hpp"

namespace ringattn {

struct StoreRank {
  StoreAddress address;
  int rank = 0;
  int size = 1;
  std::string job;  // RINGATTN_JOB, else torchrun's or Slurm's name for it; empty: there is none
};

// Whether RINGATTN_STORE is set.
bool store_asked_for();

// Throws kUsage, naming the variable, for what is missing, is no number, or contradicts itself.
StoreRank store_rank();

}  // namespace ringattn
