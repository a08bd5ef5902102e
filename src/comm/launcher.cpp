// SPDX-License-Identifier: Apache-2.0
#include "comm/launcher.hpp"

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "base/error.hpp"
#include "comm/store_rank.hpp"

namespace ringattn {

namespace {

// The variables of one launcher.
struct LauncherRow {
  const char* rank;
  const char* ranks;  // nullptr: it has none
  const char* here;   // the ranks on this host; nullptr: it has none
  bool joins;         // its processes are ranks of MPI
};

// The first that is set counts: an mpirun inside a Slurm job sets both.
constexpr LauncherRow kTable[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", true},  // Open MPI
    {"PMIX_RANK", nullptr, nullptr, true},                                                 // PMIx, also that of srun
    {"PMI_RANK", "PMI_SIZE", nullptr, true},                                               // MPICH and its kin
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", nullptr, false},                              // srun, with or without MPI
};

const char* value_of(const char* name) { return name == nullptr ? nullptr : std::getenv(name); }

std::optional<int> first_number(const char* LauncherRow::*name) {
  for (const LauncherRow& row : kTable) {
    if (const char* text = value_of(row.*name)) return std::atoi(text);
  }
  return std::nullopt;
}

}  // namespace

bool launched_by_mpi() {
  return std::any_of(std::begin(kTable), std::end(kTable), [](const LauncherRow& row) {
    return row.joins && (value_of(row.rank) != nullptr || value_of(row.ranks) != nullptr);
  });
}

std::optional<int> launched_rank() { return first_number(&LauncherRow::rank); }

std::optional<int> launched_ranks() { return first_number(&LauncherRow::ranks); }

std::optional<int> launched_ranks_here() { return first_number(&LauncherRow::here); }

bool launched_as_rank() { return store_asked_for() || launched_by_mpi(); }

bool speaks_for_launched() {
  if (!store_asked_for()) return !launched_by_mpi() || launched_rank().value_or(0) == 0;
  try {
    return store_rank().rank == 0;
  } catch (const Error&) {
    return true;  // it can't meet others, and says why
  }
}

}  // namespace ringattn
