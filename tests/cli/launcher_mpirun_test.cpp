// SPDX-License-Identifier: Apache-2.0
// `ringattn launch` with the real mpirun: how jobs end. launcher_end_test.cpp has the cases that need none.
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <sstream>
#include <string>

#include "tests/cli/launcher_machine.hpp"

namespace ringattn::testing {
namespace {

TEST(LauncherWithMpirun, PassesCodesThrough) {
  const RealMachine machine("exit $1");
  for (const char* code : {"0", "2", "6", "7"}) {
    EXPECT_EQ(machine.start({"-np", "2", code}).code, std::atoi(code));
  }
}

TEST(LauncherWithMpirun, AKilledRankIsAPeerFailure) {
  const RealMachine machine("test $OMPI_COMM_WORLD_RANK = 1 && kill -9 $$\nexec sleep 100");
  const Finished run = machine.start({"-np", "3", "run"});
  EXPECT_EQ(run.code, 6) << run.err;
  EXPECT_TRUE(has(run.err, "a rank was killed (by signal 9;")) << run.err;
}

TEST(LauncherWithMpirun, ARankThatLeavesWithZeroIsAPeerFailure) {
  const RealMachine machine("test $OMPI_COMM_WORLD_RANK = 1 && exit 0\nexec " RINGATTN_TOOL " \"$@\"");
  const Finished run = machine.start(Words{"-np", "2", "run", "--quiet", "--timeout", "5"} + small_job());
  EXPECT_EQ(run.code, 6) << run.err;
}

TEST(LauncherWithMpirun, WhatMpirunRefusesIsItsOwnFailure) {
  const RealMachine machine("exit 0");
  const Finished policy = machine.start({"-np", "1", "--bind-to", "fish", "run"});
  EXPECT_EQ(policy.code, 4) << policy.err;
  EXPECT_TRUE(has(policy.err, "mpirun could not start the ranks (")) << policy.err;
}

TEST(LauncherWithMpirun, RunsTheProgram) {
  const RealMachine machine("exec " RINGATTN_TOOL " \"$@\"");
  const Finished one = tool(Words{"run", "--quiet"} + small_job());
  const Finished two = machine.start(Words{"-np", "2", "run", "--quiet"} + small_job());
  ASSERT_EQ(two.code, 0) << two.err;
  EXPECT_EQ(digest_of(two.out), digest_of(one.out));
  EXPECT_EQ(machine.start({"-np", "2", "run", "--softcp", "1"}).code, 2);
}

// A new one for each job, which reaches every rank, also through daemons on other hosts, and stands in no command line.
TEST(LauncherWithMpirun, MakesASecretThatNoCommandLineShows) {
  RealMachine machine(
      "shown=$(cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0\\n' '  ' |\n"
      "  awk '{ print index($0, ENVIRON[\"RINGATTN_STORE_SECRET\"]) }')\n"
      "echo \"$RINGATTN_STORE_SECRET shown: $shown\"");
  const std::string seen = machine.folder().file("seen");
  // Each host has a folder for Open MPI's session: daemons that share one collide as they make it.
  machine.script("agent", "host=$1; shift; echo \"$*\" >>" + seen + "; export TMPDIR=" +
                              machine.folder().file("$host") + "; mkdir -p $TMPDIR; exec sh -c \"$*\"");
  const Variables variables{{"RINGATTN_STORE", "127.0.0.1:29555"},
                            {"OMPI_MCA_plm_rsh_agent", machine.folder().file("agent")}};
  std::set<std::string> secrets;
  for (const Words& hosts : {Words{"-np", "2"}, Words{"--host", "one-host:1,another-host:1"}}) {
    const Finished run = machine.start(hosts + Words{"run"}, variables);
    ASSERT_EQ(run.code, 0) << run.err;
    std::istringstream lines(run.out);
    std::string secret;
    int ranks = 0;
    for (std::string shown, at; lines >> secret >> shown >> at; ++ranks) {
      EXPECT_EQ(secret.size(), 64U) << run.out;
      EXPECT_EQ(at, "0") << run.out;
      secrets.insert(secret);
    }
    EXPECT_EQ(ranks, 2) << run.out;
  }
  EXPECT_EQ(secrets.size(), 2U);
  const std::string commands = read_whole(seen);
  EXPECT_TRUE(has(commands, "orted")) << commands;
  for (const std::string& secret : secrets) EXPECT_FALSE(has(commands, secret)) << commands;
}

TEST(LauncherWithMpirun, AReportThatStdoutDoesNotTakeIsAFileError) {
  const RealMachine machine("exec " RINGATTN_TOOL " \"$@\"");
  const Words command{"bash", "-c", "exec \"$@\" >/dev/full", "bash", "timeout", "-s",
                      "KILL", "60", machine.launcher()};
  const Finished run = machine.run(command + Words{"-np", "2", "run", "--quiet", "--json", "-"} + small_job());
  EXPECT_EQ(run.code, 3) << run.err;
}

TEST(LauncherWithMpirun, ReadsNoCodeOutOfAnInputsName) {
  const RealMachine machine("exec " RINGATTN_TOOL " \"$@\"");
  for (const char* name : {"not enough slots.safetensors", "Node failure.safetensors"}) {
    const Finished run = machine.start({"-np", "2", "run", "--input", name});
    EXPECT_EQ(run.code, 3) << run.err;
  }
}

// Starts a long job of two ranks in the background, waits until they have planned it, and does `$1` then, for which
// `$launcher` and `$mpirun` are process ids. Prints the launcher's code, the states of the ranks that are still there,
// and what is left in TMPDIR.
constexpr const char* kWatch = R"(
: >"$3"  # what an earlier launcher said is not waited for
"$2" -np 2 run --synthetic 7 --seq 1m --backend cpu --progress off >"$3" 2>&1 &
launcher=$!
until grep -q '^# layout' "$3"; do sleep 0.05; done
supervisor=$(pgrep -P $launcher)
mpirun=$(pgrep -P $supervisor)
ranks=$(pgrep -P $mpirun)
eval "$1"
wait $launcher
echo code $?
cat "$3" >&2
for i in {1..200}; do
  left=$(cat /dev/null $(printf '/proc/%s/status ' $supervisor $mpirun $ranks) 2>/dev/null | grep '^State:.[^Z]')$(ls "$TMPDIR")
  [[ -n $left ]] || exit 0
  sleep 0.1
done
echo "$left"
)";

class LauncherSignals : public ::testing::Test {
 protected:
  std::string watch(const std::string& action) {
    const Finished run = machine_.run({"timeout", "-s", "KILL", "100", "bash", "-c", kWatch, "watch", action,
                                       machine_.launcher(), machine_.folder().file("said")},
                                      {{"TMPDIR", temporary_.path()}});
    said_ = run.err;
    return run.out;
  }

  std::string said_;

 private:
  const RealMachine machine_{"exec " RINGATTN_TOOL " \"$@\""};
  const TemporaryFolder temporary_;
};

TEST_F(LauncherSignals, OneToTheLauncherReachesTheRanks) {
  EXPECT_EQ(watch("kill -TERM $launcher"), "code 143\n") << said_;
  EXPECT_EQ(watch("kill -HUP $launcher"), "code 129\n") << said_;
}

TEST_F(LauncherSignals, OneToMpirunIsNoFailureOfMpirun) {
  for (const std::string signal : {"INT", "TERM", "HUP"}) {
    EXPECT_EQ(watch("kill -" + signal + " $mpirun"), "code 143\n") << signal << said_;
    EXPECT_TRUE(has(said_, "mpirun was told to stop (")) << said_;
  }
}

TEST_F(LauncherSignals, AKilledMpirunLeavesNothingBehind) {
  EXPECT_EQ(watch("kill -KILL $mpirun"), "code 6\n") << said_;
  EXPECT_TRUE(has(said_, "mpirun was killed (by signal 9;")) << said_;
}

TEST_F(LauncherSignals, AKilledLauncherTakesTheJobAlong) {
  EXPECT_EQ(watch("kill -KILL $launcher"), "code 137\n") << said_;
}

TEST_F(LauncherSignals, MpirunThatDoesNotAnswerOneIsEnded) {
  if (!long_tests()) GTEST_SKIP() << "RINGATTN_TEST_LONG isn't 1";
  EXPECT_EQ(watch("kill -STOP $mpirun; kill -TERM $launcher"), "code 143\n") << said_;
}

}  // namespace
}  // namespace ringattn::testing
