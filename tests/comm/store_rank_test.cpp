// SPDX-License-Identifier: Apache-2.0
// What the environment says of a rank is checked before it is used.
#include "comm/store_rank.hpp"

#include <gtest/gtest.h>

#include <deque>
#include <initializer_list>
#include <utility>

#include "comm/launcher.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scoped_environment.hpp"

namespace ringattn {
namespace {

using testing::error_of;

class Variables {
 public:
  Variables(std::initializer_list<std::pair<const char*, const char*>> variables) {
    for (const auto& [name, value] : variables) variables_.emplace_back(name, value);
  }

 private:
  std::deque<testing::ScopedEnvironment> variables_;
};

TEST(StoreRank, ReadsWhatTorchrunSays) {
  EXPECT_FALSE(store_requested());
  const Variables variables{
      {"RINGATTN_STORE", "node1:29555"}, {"RANK", "3"},         {"WORLD_SIZE", "8"},   {"LOCAL_RANK", "1"},
      {"TORCHELASTIC_RUN_ID", "train"},  {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_JOB_ID", "17"}};
  EXPECT_TRUE(store_requested());
  const StoreRank mine = store_rank();
  EXPECT_EQ(mine.address.text(), "node1:29555");
  EXPECT_EQ(mine.rank, 3);
  EXPECT_EQ(mine.size, 8);
  EXPECT_EQ(mine.job, "torchrun train");
  EXPECT_TRUE(launched_as_rank());
  EXPECT_FALSE(prints_for_launcher());
}

TEST(StoreRank, ReadsWhatSlurmSays) {
  const Variables variables{{"RINGATTN_STORE", "10.0.0.7:1"},
                            {"SLURM_PROCID", "0"},
                            {"SLURM_NTASKS", "2"},
                            {"SLURM_JOB_ID", "17"},
                            {"SLURM_STEP_ID", "4"}};
  EXPECT_EQ(store_rank().rank, 0);
  EXPECT_EQ(store_rank().size, 2);
  EXPECT_EQ(store_rank().job, "Slurm 17.4");
  EXPECT_TRUE(prints_for_launcher());
  const Variables step{{"SLURM_STEP_NUM_TASKS", "4"}};  // of this step of the job
  EXPECT_EQ(store_rank().size, 4);
  const Variables named{{"RINGATTN_JOB", "mine"}};
  EXPECT_EQ(store_rank().job, "mine");
}

// An mpirun may start processes that don't speak MPI.
TEST(StoreRank, ReadsWhatAnMpirunSays) {
  const Variables variables{
      {"RINGATTN_STORE", "node1:29555"}, {"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}};
  EXPECT_EQ(store_rank().rank, 1);
  EXPECT_EQ(store_rank().job, "");
  EXPECT_FALSE(prints_for_launcher());
}

TEST(StoreRank, NamesTheVariableThatIsWrong) {
  struct Case {
    const char* name;
    const char* value;
    const char* text;
  };
  const Case cases[] = {
      {"RINGATTN_STORE", "node1", "RINGATTN_STORE is \"node1\""},
      {"RINGATTN_STORE", "node1:x", "RINGATTN_STORE is \"node1:x\""},
      {"RANK", "x", "RANK is \"x\" (it takes a whole number from 0 to 1)"},
      {"RANK", "-1", "RANK is \"-1\""},
      {"RANK", "2", "RANK is \"2\" (it takes a whole number from 0 to 1)"},
      {"RANK", "1 ", "RANK is \"1 \""},
      {"RANK", "", "no rank is"},
      {"WORLD_SIZE", "0", "WORLD_SIZE is \"0\""},
      {"WORLD_SIZE", "5000", "WORLD_SIZE is \"5000\""},
      {"WORLD_SIZE", "99999999999999999999", "WORLD_SIZE is \"99999999999999999999\""},
      {"WORLD_SIZE", "2.5", "WORLD_SIZE is \"2.5\""},
      {"WORLD_SIZE", "", "no world size is (RANK is, and WORLD_SIZE is not)"},
  };
  for (const Case& one : cases) {
    const Variables good{{"RINGATTN_STORE", "node1:29555"}, {"RANK", "1"}, {"WORLD_SIZE", "2"}};
    EXPECT_EQ(store_rank().rank, 1);
    const Variables bad{{one.name, one.value}};
    const Error error = error_of([] { store_rank(); });
    EXPECT_EQ(error.code(), ErrorCode::kUsage) << error.what();
    EXPECT_NE(std::string(error.what()).find(one.text), std::string::npos) << error.what();
    EXPECT_TRUE(prints_for_launcher()) << one.name;  // each such process says so itself
  }
}

}  // namespace
}  // namespace ringattn
