// SPDX-License-Identifier: Apache-2.0
// The environment variables by which launchers tell a process its rank.
#pragma once

#include <array>

namespace ringattn {

// Who believes a row.
enum class RankUse {
  kMpi,        // its processes are ranks of MPI; a store takes it too, of an mpirun that only starts processes
  kProcesses,  // plain processes, which meet at a store; with MPI they are told from a process that is alone
  kStore,      // only where a store was asked for: others may have set it for something else
};

struct RankVariables {
  const char* rank;
  const char* ranks;  // nullptr: it has none
  const char* here;   // the ranks on this host; nullptr: it has none
  RankUse use;
};

// The first that is set counts: a launcher inside another's job sets its own beside those.
inline constexpr std::array kRankVariables{
    RankVariables{"RANK", "WORLD_SIZE", nullptr, RankUse::kStore},  // torchrun, and by hand
    RankVariables{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", RankUse::kMpi},
    RankVariables{"PMIX_RANK", nullptr, nullptr, RankUse::kMpi},                          // also that of srun
    RankVariables{"PMI_RANK", "PMI_SIZE", nullptr, RankUse::kMpi},                        // MPICH and its kin
    RankVariables{"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", nullptr, RankUse::kProcesses},  // srun
    RankVariables{"SLURM_PROCID", "SLURM_NTASKS", nullptr, RankUse::kStore},
};

}  // namespace ringattn
