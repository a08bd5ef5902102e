// SPDX-License-Identifier: Apache-2.0
// Machines for tests of `ringattn launch`: fake programs at the start of PATH. RINGATTN_TOOL is ringattn, and
// RINGATTN_FAKE_RANK is tests/support/fake_rank.cpp.
#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "tests/cli/tool.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {

// Whether tests that wait for long may do so.
inline bool long_tests() {
  const char* value = std::getenv("RINGATTN_TEST_LONG");
  return value != nullptr && std::string(value) == "1";
}

// As it comes: a host of 8 cores, one NUMA node, no GPU, an ordinary user, and an mpirun that says $FAKE_TEXT on stderr
// and leaves with $FAKE_CODE. Before, $FAKE_RANKS holds what each rank tells the launcher, as words of fake_rank.
class Machine {
 public:
  Machine() {
    script("nvidia-smi", "echo 'no driver' >&2; exit 9");
    script("nproc", "echo 8");
    lscpu("0,0\n1,0\n2,0\n3,0\n4,0\n5,0\n6,0\n7,0", "0");
    script("id", "echo 1000");
    script("mpirun",
           "case $1 in --version) echo 'mpirun (Open MPI) 4.1.4'; exit 0;; esac\n"
           "for rank in $FAKE_RANKS; do " RINGATTN_FAKE_RANK
           " $rank; done\n"
           "printf '%s\\n' \"$FAKE_TEXT\" >&2\n"
           "${FAKE_HANG:+exec sleep 1000}\n"
           "exit ${FAKE_CODE:-0}");
    script("ringattn", "exit 0");
    script("launcher", "export RINGATTN_PROGRAM=\"${RINGATTN_PROGRAM-" + folder_.file("ringattn") +
                           "}\"\nexec " RINGATTN_TOOL " launch \"$@\"");
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

  // `ringattn launch` with this machine's program for the ranks.
  std::string launcher() const { return folder_.file("launcher"); }
  // Starts it. One that doesn't end is killed after a minute, with code 137.
  Finished start(const Words& words, const Variables& variables = {}) const {
    return run(Words{"timeout", "-s", "KILL", "60", launcher()} + words, variables);
  }
  // Any command on this machine.
  Finished run(const Words& words, const Variables& variables = {}) const {
    Words all{"env"};
    for (const char* name : {"CUDA_VISIBLE_DEVICES", "NCCL_NVLS_ENABLE", "OMPI_ALLOW_RUN_AS_ROOT",
                             "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_NNODES"}) {
      all = all + Words{"-u", name};
    }
    for (const auto& [name, value] : variables) all.push_back(name + "=" + value);
    return run_program(all + words, {{"PATH", folder_.path() + ":" + std::getenv("PATH")}});
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

#endif

}  // namespace ringattn::testing
