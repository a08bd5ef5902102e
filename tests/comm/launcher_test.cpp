// SPDX-License-Identifier: Apache-2.0
#include "comm/launcher.hpp"

#include <gtest/gtest.h>

#include "tests/support/scoped_environment.hpp"

namespace ringattn {
namespace {

TEST(Launcher, KnowsThoseOfMpi) {
  EXPECT_FALSE(launched_by_mpi());
  for (const char* mark : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK"}) {
    const testing::ScopedEnvironment variable(mark, "0");
    EXPECT_TRUE(launched_by_mpi()) << mark;
  }
  const testing::ScopedEnvironment slurm("SLURM_PROCID", "0");  // srun starts programs without MPI, too
  EXPECT_FALSE(launched_by_mpi());
}

TEST(Launcher, ReadsRankAndRanks) {
  EXPECT_FALSE(launched_rank());
  EXPECT_FALSE(launched_ranks());
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"}) {
    const testing::ScopedEnvironment rank(name, "3");
    EXPECT_EQ(launched_rank(), 3) << name;
    EXPECT_EQ(prints_for_launcher(), !launched_by_mpi()) << name;
  }
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const testing::ScopedEnvironment ranks(name, "8");
    EXPECT_EQ(launched_ranks(), 8) << name;
  }
}

TEST(Launcher, ReadsTheRanksOfThisHost) {
  EXPECT_FALSE(launched_local_ranks());
  const testing::ScopedEnvironment ranks("OMPI_COMM_WORLD_LOCAL_SIZE", "4");
  EXPECT_EQ(launched_local_ranks(), 4);
}

TEST(Launcher, TakesTheWordOfTheInnerLauncher) {
  const testing::ScopedEnvironment outer("SLURM_PROCID", "5");
  const testing::ScopedEnvironment inner("OMPI_COMM_WORLD_RANK", "0");
  EXPECT_EQ(launched_rank(), 0);
  EXPECT_TRUE(prints_for_launcher());
}

TEST(Launcher, LetsAProcessAloneSpeak) {
  EXPECT_TRUE(prints_for_launcher());
  // Not a rank: a program in a batch script that srun has started.
  const testing::ScopedEnvironment slurm("SLURM_PROCID", "1");
  const testing::ScopedEnvironment tasks("SLURM_STEP_NUM_TASKS", "4");
  EXPECT_TRUE(prints_for_launcher());
}

}  // namespace
}  // namespace ringattn
