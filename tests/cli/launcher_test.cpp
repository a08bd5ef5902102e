// SPDX-License-Identifier: Apache-2.0
// `ringattn launch`: what it finds and what it starts, on machines made of fake programs. How jobs end is in
// launcher_end_test.cpp.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>

#include "tests/cli/launcher_machine.hpp"

namespace ringattn::testing {
namespace {

constexpr const char* kTwoGpus =
    "echo 'GPU 0: NVIDIA H200 (UUID: GPU-aaaa-01)'; echo 'GPU 1: NVIDIA H200 (UUID: GPU-bbbb-02)'";

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

// Only by its name: every user of the host can read a command's arguments.
TEST(Launcher, HandsASecretOnByItsName) {
  const Machine machine;
  const std::string text(64, 's');
  const std::pair<std::string, std::string> store{"RINGATTN_STORE", "127.0.0.1:29555"};
  const std::string made = machine.command({"run"}, {store});
  EXPECT_TRUE(has(made, " -x RINGATTN_STORE_SECRET ")) << made;
  const std::string given = machine.command({"run"}, {store, {"RINGATTN_STORE_SECRET", text}});
  EXPECT_TRUE(has(given, " -x RINGATTN_STORE_SECRET ")) << given;
  for (const std::string& command : {made, given}) {
    EXPECT_FALSE(has(command, "RINGATTN_STORE_SECRET=")) << command;
    EXPECT_FALSE(has(command, text)) << command;
  }
  const std::string file = machine.command({"run"}, {store, {"RINGATTN_STORE_SECRET_FILE", "/run/secret"}});
  EXPECT_TRUE(has(file, " -x RINGATTN_STORE_SECRET_FILE ")) << file;
  // Ranks that don't meet at a store have nothing to prove; a user may want none.
  for (const Variables& variables : {Variables{}, Variables{store, {"RINGATTN_STORE_SECRET", ""}}}) {
    EXPECT_FALSE(has(machine.command({"run"}, variables), "SECRET"));
  }
  EXPECT_FALSE(has(file, " -x RINGATTN_STORE_SECRET ")) << file;
  const Finished shown = machine.start({"-x", "RINGATTN_STORE_SECRET=" + text, "run"}, {store});
  EXPECT_EQ(shown.code, 2);
  EXPECT_TRUE(has(shown.err, "-x RINGATTN_STORE_SECRET has a value (")) << shown.err;
  EXPECT_FALSE(has(shown.err, text)) << shown.err;
}

TEST(Launcher, FindsTheProgram) {
  const Machine machine;
  EXPECT_TRUE(has(machine.command({"run"}, {{"RINGATTN_PROGRAM", ""}}), RINGATTN_TOOL " run\n")) << "itself";
  EXPECT_TRUE(has(machine.command({"run"}), machine.folder().file("ringattn") + " run"));
  EXPECT_TRUE(has(machine.command({"run"}, {{"RINGATTN_PROGRAM", "/bin/sh"}}), "sh run\n"));
  EXPECT_FALSE(has(machine.command({"run"}, {{"RINGATTN_PROGRAM", "/bin/sh"}}), "-x RINGATTN_PROGRAM"))
      << "the program refuses variables that mean nothing to it";
  const std::string missing = machine.folder().file("missing");
  const Finished none = machine.start({"run"}, {{"RINGATTN_PROGRAM", missing}});
  EXPECT_EQ(none.code, 4);
  EXPECT_TRUE(has(none.err, missing + " can't be run (RINGATTN_PROGRAM names it).")) << none.err;
}

TEST(Launcher, HasAWrapperThatFindsTheProgram) {
  Machine machine;
  machine.script("ringattn", "exec " RINGATTN_TOOL " \"$@\"");
  const std::string wrapper = machine.folder().write("ringattn-mpirun", read_whole(RINGATTN_LAUNCHER));
  const auto wrapped = [&](const std::string& script, const Variables& variables) {
    return machine.run({"bash", script, "--dry-run", "run"}, variables);
  };
  EXPECT_TRUE(has(wrapped(wrapper, {}).out, machine.folder().file("ringattn") + " run\n")) << "beside it";
  EXPECT_TRUE(has(wrapped(wrapper, {{"RINGATTN_PROGRAM", RINGATTN_TOOL}}).out, RINGATTN_TOOL " run\n"));
  const TemporaryFolder elsewhere;
  const std::string moved = elsewhere.write("ringattn-mpirun", read_whole(RINGATTN_LAUNCHER));
  EXPECT_TRUE(has(wrapped(moved, {}).out, machine.folder().file("ringattn") + " run\n")) << "on PATH";
  const Finished none = run_program({"bash", moved, "run"}, {{"PATH", "/usr/bin:/bin"}});
  EXPECT_EQ(none.code, 4);
  EXPECT_TRUE(has(none.err, "ringattn-mpirun: error: ringattn isn't found (not beside this script")) << none.err;
  EXPECT_EQ(wrapped(wrapper, {{"RINGATTN_PROGRAM", elsewhere.file("missing")}}).code, 4);
}

TEST(Launcher, HasAHelp) {
  EXPECT_TRUE(has(tool({"--help"}).out, "\n  launch  "));
  const Finished help = tool({"launch", "--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_TRUE(has(help.out, "--start-limit S")) << help.out;
  EXPECT_EQ(tool({"help", "launch"}).out, help.out);
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
      {{"--start-limit", "1m", "run"}, "--start-limit is \"1m\" (it takes whole seconds)."},
      {{"--launcher", "ssh", "run"}, "--launcher is \"ssh\" (it takes mpirun or srun)."},
      {{"--launcher", "srun", "run"}, "--launcher srun outside a Slurm allocation ("}};
  for (const auto& [words, message] : cases) {
    const Finished run = machine.start(words);
    EXPECT_EQ(run.code, 2) << message;
    EXPECT_TRUE(has(run.err, message)) << run.err;
    EXPECT_EQ(run.out, "");
  }
  EXPECT_EQ(machine.start({"--hostfile", machine.folder().file("missing"), "run"}).code, 3);
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
  machine.script("srun", "exit 65");
  EXPECT_EQ(machine.start({"--launcher", "srun", "run"}, slurm).code, 1) << "a rank on another host left with 1";
  machine.script("srun", "echo 'srun: error: Unable to create step for job 17' >&2; exit 1");
  EXPECT_EQ(machine.start({"--launcher", "srun", "run"}, slurm).code, 4);
}

TEST(Launcher, NumbersFromOutsideAreCheckedAndNeverRun) {
  Machine machine;
  const std::string mark = machine.folder().file("mark");
  const std::string code = "PATH[$(touch " + mark + ")]";
  for (const char* name : {"SLURM_NNODES", "SLURM_NTASKS"}) {
    for (const std::string& value :
         {code, std::string("0"), std::string("-1"), std::string("4x"), std::string("9999999999")}) {
      const Finished run = machine.start({"--dry-run", "run"}, {{"SLURM_JOB_ID", "17"}, {name, value}});
      EXPECT_EQ(run.code, 2) << name << " " << value;
      EXPECT_TRUE(has(run.err, std::string(name) + " is \"" + value + "\" (it takes a number).")) << run.err;
    }
  }
  machine.script("nproc", "echo '" + code + "'");
  machine.script("id", "echo '" + code + "'");
  machine.script("nvidia-smi", kTwoGpus);
  machine.command({"-np", "3", "run"}, {{"CUDA_VISIBLE_DEVICES", code}, {"RINGATTN_TIMEOUT", code}});
  EXPECT_TRUE(has(machine.command({"run"}, {{"CUDA_VISIBLE_DEVICES", "18446744073709551616"}}), " -np 1 "))
      << "2^64 is not GPU 0";
  const std::string hosts = machine.folder().write("hosts", "node1 slots=" + code + "\n");
  EXPECT_EQ(machine.start({"--dry-run", "--hostfile", hosts, "run"}).code, 3);
  EXPECT_FALSE(std::filesystem::exists(mark));
}

TEST(Launcher, TakesNoHostThatIsAnOptionOfTheRemoteShell) {
  const Machine machine;
  for (const char* list : {"-oProxyCommand=touch", "a,-b", "a;b", "a:x", "a,,b", "a b"}) {
    const Finished run = machine.start({"--dry-run", "--host", list, "run"});
    EXPECT_EQ(run.code, 2) << list;
    EXPECT_TRUE(has(run.err, "(it takes hosts with their slots).")) << run.err;
  }
  const std::string hosts = machine.folder().write("hosts", "node1 slots=1\n  -oProxyCommand=touch slots=1\n");
  const Finished run = machine.start({"--dry-run", "--hostfile", hosts, "run"});
  EXPECT_EQ(run.code, 3);
  EXPECT_TRUE(has(run.err, "line 2, names no host (")) << run.err;
}

TEST(Launcher, AHostfileIsARegularFileOfSomeLines) {
  const Machine machine;
  const std::string pipe = machine.folder().file("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const std::string large = machine.folder().write("large", std::string(2 << 20, '#'));
  for (const std::string& file : {std::string("/dev/zero"), pipe, machine.folder().path(), large}) {
    EXPECT_EQ(machine.start({"--dry-run", "--hostfile", file, "run"}).code, 3) << file;
    EXPECT_EQ(machine.start({"--dry-run", "-np", "2", "--hostfile", file, "run"}).code, 3) << file;
  }
}

TEST(Launcher, WaitsAMomentForAToolThatHangs) {
  Machine machine;
  machine.script("nvidia-smi", "exec sleep 1000");
  const Finished run = machine.start({"--dry-run", "run"});
  EXPECT_EQ(run.code, 0);
  EXPECT_TRUE(has(run.err, "nvidia-smi did not answer within 10 s; GPUs are counted in /dev instead.")) << run.err;
}

TEST(Launcher, WantsAFolderForTheJob) {
  const Machine machine;
  const std::string missing = machine.folder().file("missing");
  const Finished run = machine.start({"run"}, {{"TMPDIR", missing}});
  EXPECT_EQ(run.code, 3);
  EXPECT_TRUE(has(run.err, missing + " takes no temporary folder (TMPDIR names it")) << run.err;
}

TEST(Launcher, HasMpirunNoticeALostHostAfterTheRanksHave) {
  const Machine machine;
  // Checks when mpirun gives up a connection, in seconds after the last word from the other side.
  const auto expect = [&](int timeout, const Words& words, const Variables& variables = {}) {
    const std::string command = machine.command(words, variables);
    const auto number = [&](const std::string& name) {
      const std::size_t at = command.find("OMPI_MCA_oob_tcp_keepalive_" + name + "=");
      return at == std::string::npos ? 0 : std::atoi(command.c_str() + command.find('=', at) + 1);
    };
    const int probing = number("intvl") * number("probes");
    EXPECT_GT(probing, timeout + 5) << "a link that comes back in time does no harm: " << command;
    EXPECT_LE(probing + number("time"), timeout + 5 + 3 + timeout / 50) << command;
    EXPECT_LE(number("probes"), 127) << "what Linux takes";
  };
  expect(60, {"run"});
  expect(5, {"run", "--timeout", "5"});
  expect(7, {"run", "--timeout=7.5"}, {{"RINGATTN_TIMEOUT", "30"}});
  expect(30, {"run"}, {{"RINGATTN_TIMEOUT", "30"}});
  expect(3600, {"run", "--timeout", "3600"});
  EXPECT_FALSE(has(machine.command({"run", "--config", "file"}), "keepalive")) << "it may hold a longer timeout";
}

TEST(Scripts, RefuseWhatTheyDoNotTakeInTheGrammarOfMessages) {
  const std::pair<const char*, const char*> cases[] = {
      {"tests/run.sh",
       "run.sh: error: unknown argument --nope (it takes --torch, --cold and --all). Try ./tests/run.sh alone.\n"},
      {"tests/run_gpu.sh", "error: unknown part or option --nope (the parts are build "},
      {"launch/quickstart.sh",
       "quickstart.sh: error: unknown argument --nope (it takes --cuda). Try ./launch/quickstart.sh alone.\n"},
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
