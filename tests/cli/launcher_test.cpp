// SPDX-License-Identifier: Apache-2.0
// launch/ringattn-mpirun: what it finds, what it starts, which exit code it leaves with. Machines are made of fake
// programs on PATH; a few tests use the mpirun that is installed.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>

#include "tests/cli/tool.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

constexpr const char* kTwoGpus =
    "echo 'GPU 0: NVIDIA H200 (UUID: GPU-aaaa-01)'; echo 'GPU 1: NVIDIA H200 (UUID: GPU-bbbb-02)'";

// A folder of fake programs in front of PATH. As it comes: a host of 8 cores, one NUMA node, no GPU, an ordinary user,
// and an mpirun that says $FAKE_TEXT on stderr and leaves with $FAKE_CODE.
class Machine {
 public:
  Machine() {
    script("nvidia-smi", "echo 'no driver' >&2; exit 9");
    script("nproc", "echo 8");
    lscpu("0,0\n1,0\n2,0\n3,0\n4,0\n5,0\n6,0\n7,0", "0");
    script("id", "echo 1000");
    script("mpirun",
           "case $1 in --version) echo 'mpirun (Open MPI) 4.1.4'; exit 0;; esac\n"
           "printf '%s\\n' \"$FAKE_TEXT\" >&2; exit ${FAKE_CODE:-0}");
    script("ringattn", "exit 0");
  }

  void script(const std::string& name, const std::string& body) {
    const std::string path = folder_.write(name, "#!/bin/sh\n" + body + "\n");
    ASSERT_EQ(::chmod(path.c_str(), 0755), 0);
  }
  // `cores`: lines "core,socket", one a processor; `nodes`: its NUMA nodes, one a line.
  void lscpu(const std::string& cores, const std::string& nodes) {
    folder_.write("cores", cores + "\n");
    folder_.write("nodes", nodes + "\n");
    script("lscpu",
           "case $1 in -p=NODE) cat " + folder_.file("nodes") + ";; *) cat " + folder_.file("cores") + ";; esac");
  }
  const TemporaryFolder& folder() const { return folder_; }

  Finished start(const Words& words, const Variables& variables = {}) const {
    Words all{"env",
              "-u",
              "CUDA_VISIBLE_DEVICES",
              "-u",
              "NCCL_NVLS_ENABLE",
              "-u",
              "OMPI_ALLOW_RUN_AS_ROOT",
              "-u",
              "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
              "-u",
              "SLURM_JOB_ID",
              "-u",
              "SLURM_NTASKS"};
    for (const auto& [name, value] : variables) all.push_back(name + "=" + value);
    return run_program(all + Words{RINGATTN_LAUNCHER} + words, {{"PATH", folder_.path() + ":" + std::getenv("PATH")}});
  }
  // The command that would be started.
  std::string command(const Words& words, const Variables& variables = {}) const {
    const Finished dry = start(Words{"--dry-run"} + words, variables);
    EXPECT_EQ(dry.code, 0) << dry.err;
    return dry.out;
  }

 private:
  TemporaryFolder folder_;
};

TEST(Launcher, RanksAreTheGpusThatAreFoundAndVisible) {
  Machine machine;
  EXPECT_TRUE(has(machine.command({"run"}), " mpirun -np 1 ")) << "a host without a GPU";
  machine.script("nvidia-smi", kTwoGpus);
  const std::string two = machine.command({"run", "--synthetic", "7"});
  EXPECT_TRUE(has(two, " mpirun -np 2 --bind-to none ")) << two;
  EXPECT_TRUE(two.ends_with("/ringattn run --synthetic 7\n")) << two;
  const std::pair<const char*, const char*> visible[] = {
      {"1", "-np 1 "},          {"0,1", "-np 2 "}, {"0, 1", "-np 2 "}, {"1,-1,0", "-np 1 "},  {"0,7,1", "-np 1 "},
      {"GPU-bbbb,0", "-np 2 "}, {"", "-np 1 "},    {"-1", "-np 1 "},   {"GPU-none", "-np 1 "}};
  for (const auto& [value, expected] : visible) {
    const std::string command = machine.command({"run"}, {{"CUDA_VISIBLE_DEVICES", value}});
    EXPECT_TRUE(has(command, expected)) << value << ": " << command;
    EXPECT_TRUE(has(command, " -x CUDA_VISIBLE_DEVICES ")) << command;
  }
  EXPECT_TRUE(has(machine.command({"-np", "5", "run"}), " -np 5 "));
}

TEST(Launcher, DefaultsAreSafeAndReplaceNothing) {
  Machine machine;
  const std::string user = machine.command({"run"});
  EXPECT_TRUE(has(user, "NCCL_NVLS_ENABLE=0 ")) << user;
  EXPECT_TRUE(has(user, " -x NCCL_NVLS_ENABLE ")) << user;
  EXPECT_FALSE(has(user, "ROOT")) << user;
  EXPECT_FALSE(has(user, "--oversubscribe")) << user;
  machine.script("id", "echo 0");
  const std::string root = machine.command({"-np", "9", "run"});
  EXPECT_TRUE(has(root, "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 ")) << root;
  EXPECT_TRUE(has(root, " --oversubscribe ")) << root;

  const std::string set =
      machine.command({"-x", "NCCL_DEBUG=INFO", "--bind-to", "core", "--mca", "btl", "tcp,self", "run"},
                      {{"NCCL_NVLS_ENABLE", "1"},
                       {"NCCL_DEBUG", "WARN"},
                       {"OMP_NUM_THREADS", "3"},
                       {"RINGATTN_SEQ", "8k"},
                       {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                       {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "0"}});
  EXPECT_FALSE(has(set, "NCCL_NVLS_ENABLE=0")) << set;
  EXPECT_FALSE(has(set, "CONFIRM=1")) << set;
  EXPECT_TRUE(has(set, " --bind-to core ")) << set;
  EXPECT_FALSE(has(set, "--bind-to none")) << set;
  EXPECT_TRUE(has(set, " --mca btl tcp\\,self ")) << set;
  EXPECT_TRUE(has(set, " -x NCCL_DEBUG=INFO ")) << set;
  EXPECT_FALSE(has(set, " -x NCCL_DEBUG ")) << set;
  EXPECT_TRUE(has(set, " -x OMP_NUM_THREADS ")) << set;
  EXPECT_TRUE(has(set, " -x RINGATTN_SEQ ")) << set;
}

TEST(Launcher, ManyRanksAreBoundToNumaNodesWhereThatFits) {
  Machine machine;
  machine.lscpu("0,0\n1,0\n2,0\n3,0\n0,1\n1,1\n2,1\n3,1", "0\n0\n0\n0\n1\n1\n1\n1");
  EXPECT_TRUE(has(machine.command({"-np", "4", "run"}), " --map-by ppr:2:numa --bind-to numa "));
  EXPECT_TRUE(has(machine.command({"-np", "2", "run"}), " --bind-to none "));
  EXPECT_TRUE(has(machine.command({"-np", "3", "run"}), " --bind-to none ")) << "three ranks, two nodes";
  machine.script("nproc", "echo 5");
  EXPECT_TRUE(has(machine.command({"-np", "4", "run"}), " --bind-to none ")) << "a part of the machine";
}

TEST(Launcher, AHostfilesSlotsAreTheRanks) {
  const Machine machine;
  const std::string hosts =
      machine.folder().write("hosts", "# two hosts\nnode1 slots=8\n\nnode2 slots = 4  # half of it\n");
  const std::string command = machine.command({"--hostfile", hosts, "run"});
  EXPECT_TRUE(has(command, " -np 12 --hostfile " + hosts + " --bind-to none ")) << command;
  EXPECT_FALSE(has(command, "--oversubscribe")) << command;
  EXPECT_FALSE(has(machine.command({"--host", "a:2,b:2", "run"}), "-np"));

  const std::string most = machine.folder().write("most", "node1 max_slots=16 slots=8 max-slots=16\n");
  EXPECT_TRUE(has(machine.command({"--hostfile", most, "run"}), " -np 8 "));

  for (const char* line : {"node1", "node1 max_slots=4", "node1 slots=", "node1 slots=8x", "node1 slots=99999999999"}) {
    const Finished bare = machine.start({"--hostfile", machine.folder().write("bare", line), "run"});
    EXPECT_EQ(bare.code, 3) << line;
    EXPECT_TRUE(has(bare.err, "line 1, has no slots (mpirun would start a rank for every core).")) << bare.err;
  }
  const std::string example = std::string(RINGATTN_SOURCE) + "/launch/hostfile.example";
  EXPECT_TRUE(has(machine.command({"--hostfile", example, "run"}), " -np 16 "));
}

TEST(Launcher, FindsTheProgram) {
  const Machine machine;
  EXPECT_TRUE(has(machine.command({"run"}), machine.folder().file("ringattn") + " run"));
  EXPECT_TRUE(has(machine.command({"run"}, {{"RINGATTN_PROGRAM", "/bin/sh"}}), "sh run\n"));
  EXPECT_FALSE(has(machine.command({"run"}, {{"RINGATTN_PROGRAM", "/bin/sh"}}), "-x RINGATTN_PROGRAM"))
      << "the program refuses variables that mean nothing to it";
  const Finished none = machine.start({"run"}, {{"RINGATTN_PROGRAM", "/nonexistent"}});
  EXPECT_EQ(none.code, 4);
  EXPECT_TRUE(has(none.err, "/nonexistent can't be run (RINGATTN_PROGRAM names it).")) << none.err;
}

TEST(Launcher, ExitCodesSayWhoFailed) {
  constexpr const char* kRankLeft = "Primary job  terminated normally, but 1 process returned\na non-zero exit code.";
  struct Case {
    int code;
    const char* text;
    int expected;
    const char* message;
  };
  const Case cases[] = {
      {0, "", 0, ""},
      {1, kRankLeft, 1, ""},
      {1, "mpirun detected that one or more processes exited with non-zero status", 1, ""},
      {2, "ringattn: error: unknown flag", 2, ""},
      {3, kRankLeft, 3, ""},
      {4, kRankLeft, 4, ""},
      {5, kRankLeft, 5, ""},
      {6, "MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD\nwith errorcode 6.", 6, ""},
      {7, kRankLeft, 7, ""},
      {137, "mpirun noticed that process rank 1 exited on signal 9 (Killed).", 6, "a rank was killed (by signal 9;"},
      {143, kRankLeft, 6, "a rank was killed (by signal 15;"},
      {139, kRankLeft, 6, "a rank was killed (by signal 11;"},
      {1, "ORTE has lost communication with a remote daemon.", 6, "a host was lost ("},
      {1, "There are not enough slots available in the system", 4, "mpirun could not start the ranks ("},
      {132, "mpirun was unable to launch the specified application", 4, "mpirun could not start the ranks ("},
      {255, "ORTE was unable to reliably start one or more daemons.", 4, "mpirun could not start the ranks ("},
      {1, "mpirun: Error: unknown option", 4, "mpirun could not start the ranks ("},
      {99, kRankLeft, 7, "a rank left with code 99 ("},
  };
  const Machine machine;
  for (const Case& c : cases) {
    const Finished run = machine.start({"run"}, {{"FAKE_CODE", std::to_string(c.code)}, {"FAKE_TEXT", c.text}});
    EXPECT_EQ(run.code, c.expected) << c.code << " with " << c.text;
    EXPECT_TRUE(has(run.err, c.text)) << "mpirun's words are passed on";
    EXPECT_EQ(has(run.err, "ringattn-mpirun: error: "), *c.message != '\0') << run.err;
    EXPECT_TRUE(has(run.err, c.message)) << run.err;
  }
}

TEST(Launcher, BadOptionsAreOneMessage) {
  Machine machine;
  const std::pair<Words, const char*> cases[] = {
      {{}, "no subcommand (there is nothing to start)."},
      {{"-np", "0", "run"}, "-np is \"0\" (it takes a number of ranks)."},
      {{"-np"}, "-np has no value (it takes one)."},
      {{"--host", "", "run"}, "--host has no value (it takes one)."},
      {{"--mca", "btl"}, "--mca has no value (it takes a name and a value)."},
      {{"--frobnicate", "run"}, "unknown option --frobnicate ("},
      {{"--launcher", "ssh", "run"}, "--launcher is \"ssh\" (it takes mpirun or srun)."},
      {{"--launcher", "srun", "run"}, "--launcher srun outside a Slurm allocation ("}};
  for (const auto& [words, message] : cases) {
    const Finished run = machine.start(words);
    EXPECT_EQ(run.code, 2) << message;
    EXPECT_TRUE(has(run.err, message)) << run.err;
    EXPECT_EQ(run.out, "");
  }
  EXPECT_EQ(machine.start({"--hostfile", "/nonexistent", "run"}).code, 3);
  machine.script("mpirun", "echo 'HYDRA build details'");
  const Finished other = machine.start({"run"});
  EXPECT_EQ(other.code, 4);
  EXPECT_TRUE(has(other.err, "isn't Open MPI's (its flags are others).")) << other.err;
}

TEST(Launcher, StartsTheTasksOfASlurmAllocation) {
  Machine machine;
  const Variables slurm{{"SLURM_JOB_ID", "17"}, {"SLURM_NTASKS", "16"}, {"SLURM_NNODES", "2"}};
  EXPECT_TRUE(has(machine.command({"run"}, slurm), " mpirun -np 16 --bind-to none "));
  const std::string srun = machine.command({"--launcher", "srun", "run"}, slurm);
  EXPECT_TRUE(has(srun, " srun --ntasks 16 --mpi=pmix --gpu-bind=none --kill-on-bad-exit=1 /")) << srun;
  machine.script("srun", "echo 'srun: error: node1: task 3: Killed' >&2; exit 137");
  EXPECT_EQ(machine.start({"--launcher", "srun", "run"}, slurm).code, 6);
  machine.script("srun", "echo 'srun: error: node1: task 0: Exited with exit code 1' >&2; exit 1");
  EXPECT_EQ(machine.start({"--launcher", "srun", "run"}, slurm).code, 1);
  machine.script("srun", "echo 'srun: error: Unable to create step for job 17' >&2; exit 1");
  EXPECT_EQ(machine.start({"--launcher", "srun", "run"}, slurm).code, 4);
}

#ifdef RINGATTN_MPIRUN

// A machine whose mpirun is the real one, with a program of the test's own.
class RealMachine : public Machine {
 public:
  explicit RealMachine(const std::string& program) {
    script("id", "exec /usr/bin/id \"$@\"");
    script("nproc", "echo 1");  // so that any number of ranks oversubscribes
    script("mpirun", "exec " RINGATTN_MPIRUN " \"$@\"");
    script("ringattn", program);
  }
};

TEST(LauncherWithMpirun, PassesCodesThrough) {
  const RealMachine machine("exit $1");
  for (const char* code : {"0", "1", "2", "6", "7"}) {
    EXPECT_EQ(machine.start({"-np", "2", code}).code, std::atoi(code));
  }
}

TEST(LauncherWithMpirun, AKilledRankIsAPeerFailure) {
  const RealMachine machine("test $OMPI_COMM_WORLD_RANK = 1 && kill -9 $$\nexec sleep 100");
  const Finished run = machine.start({"-np", "3", "run"});
  EXPECT_EQ(run.code, 6) << run.err;
  EXPECT_TRUE(has(run.err, "a rank was killed (by signal 9;")) << run.err;
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

TEST(LauncherWithMpirun, ASignalReachesTheRanksAndLeavesNone) {
  // Each rank writes its process id to the pipe, then waits for the end of time. The shell signals the launcher once
  // it has read both, and looks for them afterwards.
  const RealMachine machine("echo $$ > $PIPE; exec sleep 100");
  const std::string pipe = machine.folder().file("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  machine.folder().write("watch",
                         "exec 3<>$PIPE\n"  // open for both, so that nobody waits for the other end
                         "$1 -np 2 run & launcher=$!\n"
                         "read first <&3; read second <&3\n"
                         "kill -TERM $launcher; wait $launcher; echo code $?\n"
                         "grep -h '^State:.[^Z]' /proc/$first/status /proc/$second/status 2>/dev/null\n"
                         "exit 0\n");
  const Finished run = run_program({"bash", machine.folder().file("watch"), RINGATTN_LAUNCHER},
                                   {{"PATH", machine.folder().path() + ":" + std::getenv("PATH")}, {"PIPE", pipe}});
  EXPECT_EQ(run.out, "code 143\n") << run.err;
}

#endif

TEST(Scripts, RefuseWhatTheyDoNotTakeInTheGrammarOfMessages) {
  const std::pair<const char*, const char*> cases[] = {
      {"tests/run.sh",
       "run.sh: error: unknown argument --nope (it takes --all or nothing). Try ./tests/run.sh alone.\n"},
      {"tests/run_gpu.sh", "error: unknown part or option --nope (the parts are build "},
      {"launch/quickstart.sh",
       "quickstart.sh: error: unknown argument --nope (it takes none). Try ./launch/quickstart.sh alone.\n"},
      {"launch/install-deps.sh",
       "install-deps.sh: error: unknown argument --nope (it takes --tests and --sanitizers). Leave it out.\n"}};
  for (const auto& [script, message] : cases) {
    const Finished run = run_program({"bash", std::string(RINGATTN_SOURCE) + "/" + script, "--nope"}, {});
    EXPECT_EQ(run.code, 2) << script;
    EXPECT_TRUE(has(run.err, message)) << run.err;
  }
}

}  // namespace
}  // namespace ringattn::testing
