// SPDX-License-Identifier: Apache-2.0
// The environment variables through which launchers tell a process its rank.
#pragma once

#include <array>

namespace ringattn {

// The kinds of world that use a row.
enum class RankUse {
  kMpi,        // MPI ranks. A store uses it too, for an mpirun that only starts processes.
  kProcesses,  // plain processes that connect to a store. With MPI they show that a process has peers.
  kStore,      // only if a store was requested: the variables may be set for another purpose
};

struct RankVariables {
  const char* rank;
  const char* ranks;  // number of ranks; nullptr: no such variable
  const char* here;   // number of ranks on this host; nullptr: no such variable
  RankUse use;
};

// The first row that is set wins: a launcher inside another's job sets its own variables beside those of the job.
inline constexpr std::array kRankVariables{
    RankVariables{"RANK", "WORLD_SIZE", nullptr, RankUse::kStore},  // torchrun, or set by hand
    RankVariables{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", RankUse::kMpi},
    RankVariables{"PMIX_RANK", nullptr, nullptr, RankUse::kMpi},                          // srun sets it too
    RankVariables{"PMI_RANK", "PMI_SIZE", nullptr, RankUse::kMpi},                        // MPICH and its derivatives
    RankVariables{"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", nullptr, RankUse::kProcesses},  // srun
    RankVariables{"SLURM_PROCID", "SLURM_NTASKS", nullptr, RankUse::kStore},
};

}  // namespace ringattn
