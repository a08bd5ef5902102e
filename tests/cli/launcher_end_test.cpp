// SPDX-License-Identifier: Apache-2.0
// `ringattn launch`: how jobs end. Which exit code it leaves with, and that nothing outlives it.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/cli/launcher_machine.hpp"

namespace ringattn::testing {
namespace {

// A port of this host on which the system accepts connections and no program reads them.
class Listener {
 public:
  Listener() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(socket_, any, size), 0);
    EXPECT_EQ(::listen(socket_, 1), 0);
    EXPECT_EQ(::getsockname(socket_, any, &size), 0);
    port_ = ntohs(address.sin_port);
  }
  ~Listener() { ::close(socket_); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  int port() const { return port_; }

 private:
  const int socket_;
  int port_ = 0;
};

TEST(LauncherEnd, TheRanksSayWhatTheCodeIs) {
  struct Case {
    const char* ranks;
    int code;  // mpirun's
    int expected;
    const char* message;
  };
  constexpr const char* kRan = "started=2,code=0 started=2,code=0";
  constexpr const char* kStopped = "started=2,signal=15 started=2,signal=15";
  const Case cases[] = {
      {kRan, 0, 0, ""},
      {"", 0, 0, ""},
      {"started=2,code=1 started=2,code=1", 1, 1, ""},
      {"started=2,code=3 started=2", 1, 3, ""},
      {"started=2,code=6 started=2,code=4", 6, 4, ""},  // the rank that failed first made the others leave
      {"started=2,code=6,code=5 started=2,code=6", 6, 5, ""},
      {"started=2,code=6 started=2", 139, 6, ""},  // mpirun crashed after them
      {"started=2,code=6 started=2", 205, 6, ""},
      {"started=2,code=7 started=2", 0, 7, ""},
      // On other hosts the exit status says it.
      {"", 65, 1, ""},
      {"", 71, 7, ""},
      {"started=1,code=0", 70, 6, ""},
      // Programs that write nothing: their codes are taken where mpirun has none of that number.
      {"", 2, 2, ""},
      {"", 6, 6, ""},
      {"started=2 started=2,signal=15", 137, 6, "a rank was killed (by signal 9;"},
      {"started=2 started=2,signal=15", 132, 6, "a rank was killed (by signal 4;"},
      {"", 137, 6, "a rank was killed (by signal 9;"},
      {"rank=0,started=2,signal=15 rank=1,started=2", 137, 6, "rank 1 was killed (by signal 9;"},
      {"rank=0,started=3,signal=15 rank=1,started=3 rank=2,started=3", 137, 6, "a rank was killed (by signal 9;"},
      {"rank=1,started=2 rank=0,started=2,code=0", 0, 6, "rank 1 left early or was killed ("},
      {"started=2 started=2", 0, 6, "a rank left early or was killed ("},
      {"started=2,code=0 started=2,signal=15", 1, 6, "a rank left early or was killed ("},
      {"started=2,signal=15", 1, 6, "a rank left early or was killed ("},  // the other one has never begun
      {kStopped, 1, 143, "mpirun was told to stop ("},
      {"started=2 started=2", 205, 6, "a host was lost ("},
      {"", 205, 6, "a host was lost ("},
      {"", 1, 4, "mpirun could not start the ranks ("},
      {"", 132, 4, "mpirun could not start the ranks ("},
      {"", 213, 4, "mpirun could not start the ranks ("},
      {"", 255, 4, "mpirun could not start the ranks ("},
      {"", 99, 7, "a rank exited with code 99 ("},
      // MPI itself ends a rank that can't start it.
      {"rank=0,started=2,starting=0 rank=1,started=2,starting=0,signal=15", 1, 4, "rank 0 could not start MPI ("},
      {"started=2,starting=0 started=2,starting=0", 14, 4, "a rank could not start MPI ("},
      {"started=2,starting=0 started=2", 137, 6, "a rank was killed ("},
      {"started=2,starting=0,started=2 started=2,starting=0,signal=15", 1, 6, "a rank left early or was killed ("},
      // What isn't in the format says nothing.
      {"started=2,code=PATH[0] started=x,code", 1, 6, "a rank left early or was killed ("},
  };
  const Machine machine;
  for (const Case& c : cases) {
    const std::string text = "not enough slots, Node failure, ringattn: error:, MPI_ABORT was invoked";
    const Finished run =
        machine.start({"run"}, {{"FAKE_CODE", std::to_string(c.code)}, {"FAKE_RANKS", c.ranks}, {"FAKE_TEXT", text}});
    EXPECT_EQ(run.code, c.expected) << c.code << " with " << c.ranks;
    EXPECT_TRUE(has(run.err, text)) << "what mpirun says is passed on";
    EXPECT_EQ(has(run.err, "ringattn-mpirun: error: "), *c.message != '\0') << run.err;
    EXPECT_TRUE(has(run.err, c.message)) << run.err;
  }
}

TEST(LauncherEnd, MpirunThatGoesOnAfterItsRanksIsEnded) {
  const std::pair<const char*, int> cases[] = {
      {"started=2,code=3 started=2,code=6", 3}, {"started=1", 6}, {"started=1,code=0", 0}};
  const Machine machine;
  for (const auto& [ranks, expected] : cases) {
    if (expected == 0 && !long_tests()) continue;  // it takes as long as the one before
    const Finished run = machine.start({"run"}, {{"FAKE_RANKS", ranks}, {"FAKE_HANG", "1"}});
    EXPECT_EQ(run.code, expected) << ranks << run.err;
    EXPECT_TRUE(has(run.err, "mpirun was ended (it went on after the ranks of this host had left).")) << run.err;
  }
}

TEST(LauncherEnd, MpirunUnderWhichNoRankBeginsIsEnded) {
  const Machine machine;
  const Finished here = machine.start({"--start-limit", "2", "run"}, {{"FAKE_HANG", "1"}});
  EXPECT_EQ(here.code, 6) << here.err;
  EXPECT_TRUE(has(here.err, "no rank has begun yet. mpirun is ended 2 s after its start (--start-limit).")) << here.err;
  EXPECT_TRUE(has(here.err, "mpirun was ended (no rank had begun within 2 s).")) << here.err;
  const Finished hosts = machine.start({"--host", "a:2", "--start-limit", "2", "run"}, {{"FAKE_HANG", "1"}});
  EXPECT_EQ(hosts.code, 6) << hosts.err;
  EXPECT_TRUE(has(hosts.err, "no rank on this host had begun within 2 s, and no other host had answered")) << hosts.err;
}

TEST(LauncherEnd, AJobThatHasBegunIsNotHeldToTheStartLimit) {
  constexpr const char* kBegin = "case $1 in --version) echo 'mpirun (Open MPI) 4.1.4'; exit 0;; esac\n";
  Machine machine;
  machine.script("mpirun", std::string(kBegin) + RINGATTN_FAKE_RANK " started=1,wait=4,code=0");
  const Finished here = machine.start({"--start-limit", "2", "run"});
  EXPECT_EQ(here.code, 0) << here.err;
  EXPECT_FALSE(has(here.err, "no rank has begun")) << here.err;

  // Where all ranks are on other hosts, the launcher sees that mpirun is connected.
  const Listener daemon;
  machine.script("mpirun", std::string(kBegin) + "exec bash -c 'exec 3<>/dev/tcp/127.0.0.1/" +
                               std::to_string(daemon.port()) + "; sleep 4 3<&-; exit 0'");
  const Finished hosts = machine.start({"--host", "a:2", "--start-limit", "2", "run"});
  EXPECT_EQ(hosts.code, 0) << hosts.err;
  machine.script("mpirun", std::string(kBegin) + "sleep 4");
  EXPECT_EQ(machine.start({"--start-limit", "0", "run"}).code, 0);
}

TEST(LauncherEnd, NothingOfTheJobOutlivesItOnThisHost) {
  // A process in a session of its own that ignores SIGTERM and holds the pipes of who started the launcher. Once killed
  // it is still there for a moment, without its pipes, on a busy host.
  Machine machine;
  machine.script("mpirun",
                 "case $1 in --version) echo 'mpirun (Open MPI) 4.1.4'; exit 0;; esac\n"
                 "trap '' TERM; setsid sleep 1000 & echo $! > $PLACE/stray\nexit 6");
  const std::string place = machine.folder().path();
  const Finished run = machine.run({"bash", "-c",
                                    "said=$(timeout -s KILL 60 $0 run 2>&1); echo code $?\n"
                                    "lives() { grep -hs '^State:.[^XZ]' /proc/$(cat $PLACE/stray)/status; }\n"
                                    "for ((i = 0; i < 50; ++i)); do lives >/dev/null || break; sleep 0.1; done; lives\n"
                                    "ls -d $TMPDIR/ringattn-mpirun.* 2>/dev/null; exit 0",
                                    machine.launcher()},
                                   {{"PLACE", place}, {"TMPDIR", place}});
  EXPECT_EQ(run.out, "code 6\n") << run.err;
}

TEST(LauncherEnd, WhatIsPrintedIsPassedOnAtOnceAndWhole) {
  Machine machine;
  machine.script("mpirun",
                 "case $1 in --version) echo 'mpirun (Open MPI) 4.1.4'; exit 0;; esac\n"
                 "echo first; touch $PLACE/printed; while [ ! -e $PLACE/read ]; do sleep 0.1; done; seq 100000");
  const std::string place = machine.folder().path();
  const Finished run = machine.run({"bash", "-c",
                                    "set -o pipefail; timeout -s KILL 60 $0 run | { read -r line; touch $PLACE/read; "
                                    "sleep 2; echo $line; md5sum; }\n"
                                    "echo code $?; seq 100000 | md5sum",
                                    machine.launcher()},
                                   {{"PLACE", place}});
  const std::string::size_type code = run.out.find("code 0\n");
  ASSERT_NE(code, std::string::npos) << run.out << run.err;
  EXPECT_EQ(run.out.substr(0, code), "first\n" + run.out.substr(code + 7));
}

TEST(LauncherEnd, AStdoutThatTakesNothingIsAFileError) {
  Machine machine;
  machine.script("mpirun",
                 "case $1 in --version) echo 'mpirun (Open MPI) 4.1.4'; exit 0;; esac\n"
                 "[ -n \"$FAKE_QUIET\" ] || seq 100000; echo its end >&2; exit ${FAKE_CODE:-0}");
  const auto start = [&](const std::string& redirection, const Variables& variables = {}) {
    return machine.run({"bash", "-c", "timeout -s KILL 60 $0 run " + redirection, machine.launcher()}, variables);
  };
  const Finished full = start(">/dev/full");
  EXPECT_EQ(full.code, 3) << full.err;
  EXPECT_TRUE(has(full.err, "its end")) << "the job goes on: " << full.err;
  EXPECT_TRUE(has(full.err, "the output can't be written to stdout (No space left on device). Redirect stdout "))
      << full.err;
  EXPECT_EQ(start(">&-").code, 3);
  EXPECT_EQ(start(">&-", {{"FAKE_QUIET", "1"}}).code, 0);
  EXPECT_EQ(start(">/dev/full", {{"FAKE_QUIET", "1"}}).code, 0);
  EXPECT_EQ(start(">/dev/full", {{"FAKE_CODE", "5"}}).code, 5) << "a failure of the job's own comes first";
}

TEST(LauncherEnd, AStrangerThatHoldsThePipeDoesNotHoldTheLauncher) {
  Machine machine;
  machine.script("mpirun",
                 "case $1 in --version) echo 'mpirun (Open MPI) 4.1.4'; exit 0;; esac\n"
                 "echo said; env -u RINGATTN_OUTCOMES setsid sleep 40 2>&- &");
  const Finished run = machine.run({"timeout", "-s", "KILL", "30", machine.launcher(), "run"});
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(run.out, "said\n");
}

// The beginning of an mpirun whose rank has begun, and whose job has number 7 in the names of its files.
constexpr const char* kMpirunOfJob7 =
    "case $1 in --version) echo 'mpirun (Open MPI) 4.1.4'; exit 0;; esac\n"
    "mine=$TMPDIR/ompi.here.$(/usr/bin/id -u)/pid.$$; mkdir -p $mine; echo \"$((7 << 16)).0;tcp\" "
    ">$mine/contact.txt\n" RINGATTN_FAKE_RANK " started=1,wait=0.5,$FAKE_LAST\n";

TEST(LauncherEnd, ComesInTimeWhateverMpirunDoes) {
  // mpirun goes on after a rank has failed, a process that can't be found holds the pipe, and no other host answers.
  Machine machine;
  machine.script("mpirun", kMpirunOfJob7 + std::string("env -u RINGATTN_OUTCOMES setsid sleep 40 2>&- &\n"
                                                       "trap '' TERM; sleep 1000"));
  machine.script("ssh", "exec sleep 1000");
  const auto begun = std::chrono::steady_clock::now();
  const Finished run =
      machine.start({"--host", "a:1,b:1", "run"}, {{"TMPDIR", machine.folder().path()}, {"FAKE_LAST", "code=6"}});
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
  EXPECT_EQ(run.code, 6) << run.err;
  constexpr double kEnd = 10.0;   // after the rank has told of its failure
  constexpr double kBegin = 2.0;  // for what comes before, on a busy machine
  EXPECT_LT(took.count(), kBegin + kEnd) << run.err;
}

TEST(LauncherEnd, FilesOnOtherHostsAreRemovedByTheWayOfMpirun) {
  Machine machine;
  machine.script("mpirun", kMpirunOfJob7 + std::string("rm -r $mine; exit 205"));  // a host was lost
  machine.script("ssh", "echo by ssh: \"$@\" >>$TMPDIR/reached");
  machine.script("agent", "echo by agent: \"$@\" >>$TMPDIR/reached");
  machine.script("srun", "echo by srun: \"$@\" >>$TMPDIR/reached");
  machine.script("scontrol",
                 "[ \"$*\" = 'show hostnames' ] || exit 1\nprintf '%s\\n' node3 -oProxyCommand=x 'a b' node4");
  const auto reached = [&](const Words& words, Variables variables) {
    variables.emplace_back("TMPDIR", machine.folder().path());
    EXPECT_EQ(machine.start(words + Words{"run"}, variables).code, 6);
    const std::string text = read_whole(machine.folder().file("reached"));
    std::filesystem::remove(machine.folder().file("reached"));
    EXPECT_TRUE(has(text, "/jf.7")) << text;
    return text;
  };
  const std::string named = reached({"--host", "node1:1,node2:1"}, {});
  EXPECT_TRUE(has(named, "by ssh: node1 sh -c ") && has(named, "by ssh: node2 sh -c ")) << named;
  const std::string agent = reached({"--host", "node1:1,node2:1"}, {{"OMPI_MCA_plm_rsh_agent", "agent --option"}});
  EXPECT_TRUE(has(agent, "by agent: --option node1 sh -c ") && has(agent, "by agent: --option node2 sh -c ")) << agent;
  const std::string slurm = reached({}, {{"SLURM_JOB_ID", "17"}, {"SLURM_NTASKS", "2"}, {"SLURM_NNODES", "2"}});
  EXPECT_TRUE(has(slurm, " --nodelist node3 sh -c ") && has(slurm, " --nodelist node4 sh -c ")) << slurm;
  EXPECT_FALSE(has(slurm, "ProxyCommand")) << slurm;
}

TEST(LauncherEnd, WhatManyRanksSayAtOnceIsHeard) {
  Machine machine;
  machine.script("mpirun",
                 "case $1 in --version) echo 'mpirun (Open MPI) 4.1.4'; exit 0;; esac\n"
                 "for rank in $(seq 50); do " RINGATTN_FAKE_RANK " rank=$rank,started=50,code=0 & done; wait");
  const Finished run = machine.start({"-np", "50", "run"});
  EXPECT_EQ(run.code, 0) << run.err;
}

TEST(LauncherEnd, ARankThatDoesNotEndAfterTheJobIsEnded) {
  const Machine machine;
  for (const char* last : {"", ",code=0"}) {
    const std::string ranks =
        "rank=0,started=2,leaving=1,code=0 rank=1,started=2,leaving=1" + std::string(last) + ",wait=1000";
    const auto begun = std::chrono::steady_clock::now();
    const Finished run = machine.start({"run"}, {{"FAKE_RANKS", ranks}});
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
    EXPECT_EQ(run.code, 6) << run.err;
    EXPECT_TRUE(has(run.err, "error: rank 1 did not end (the job was done on all ranks")) << run.err;
    EXPECT_LT(took.count(), 1.0 + 10.0) << "the ranks' own second, and what the launcher adds";
  }
}

// mpirun ends its ranks when it is told to stop, and leaves them to their new parent. It reaps a rank that ends before.
TEST(LauncherEnd, MpirunThatIsToldToStopIsKnownByTheRanksThatItLeaves) {
  const std::string rank = RINGATTN_FAKE_RANK " started=2,wait=1000 & ";
  const std::string silent = RINGATTN_FAKE_RANK " started=2; ";
  // A shell would reap what it kills; a program in its place does not, and leaves with 1 for the process that isn't
  // there.
  const std::string kill = "sleep 0.5; exec kill -KILL 90000000 ";
  const std::pair<std::string, int> cases[] = {
      {rank + "a=$!; " + rank + kill + "$a $!", 143},              // before they can speak
      {rank + "a=$!; sleep 1000 & " + kill + "$a $!", 143},        // one has not begun
      {"sleep 1000 & a=$!; sleep 1000 & " + kill + "$a $!", 143},  // none has begun
      {silent + rank + kill + "$!", 6},                            // one left by itself
      {rank + kill + "$!", 6},                                     // one has never been there
  };
  Machine machine;
  for (const auto& [body, expected] : cases) {
    machine.script("mpirun", "case $1 in --version) echo 'mpirun (Open MPI) 4.1.4'; exit 0;; esac\n" + body);
    const Finished run = machine.start({"-np", "2", "run"});
    EXPECT_EQ(run.code, expected) << body << run.err;
    EXPECT_EQ(has(run.err, "mpirun was told to stop ("), expected == 143) << run.err;
  }
}

TEST(LauncherEnd, ARankOnAnotherHostPutsItsCodeIntoItsExitStatus) {
  const TemporaryFolder folder;
  const Variables elsewhere{{"RINGATTN_OUTCOMES", folder.file("none")}};
  EXPECT_EQ(tool({"run", "--input", folder.file("none.safetensors")}, elsewhere).code, 64 + 3);
  EXPECT_EQ(tool({"run", "--nope"}, elsewhere).code, 64 + 2);
  EXPECT_EQ(tool({"--version"}, elsewhere).code, 0);
}

}  // namespace
}  // namespace ringattn::testing
