// SPDX-License-Identifier: Apache-2.0
#include "launch/launcher/launcher.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <filesystem>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "comm/failure.hpp"
#include "launch/launcher/command.hpp"
#include "launch/launcher/machine.hpp"
#include "launch/launcher/supervisor.hpp"

namespace ringattn::launcher {

namespace {

// Throws if this command can't start the ranks.
void check_command(const LaunchCommand& command) {
  const std::string& name = command.words[0];
  const std::string& program = command.words[command.program];
  if (!RINGATTN_LAUNCH_MPI && program == std::filesystem::canonical("/proc/self/exe") &&
      environment_value("RINGATTN_STORE").value_or("").empty()) {
    fail(ErrorCode::kUnsupported, fmt::format("{} can't join the ranks that {} starts", program, name),
         "this build has no MPI",
         "Set RINGATTN_STORE=HOST:PORT, build with MPI, or run ringattn alone: --ranks N gives it N ranks in one "
         "process.");
  }
  const std::string path = find_on_path(name);
  if (path.empty()) {
    fail(ErrorCode::kUnsupported, fmt::format("{} isn't found", name), "it starts the ranks",
         fmt::format("Install Open MPI (openmpi-bin), or run {} alone: one rank needs no mpirun.", program));
  }
  if (command.slurm) return;
  const std::string version = output_of({name, "--version"}).value_or("");
  for (const char* known : {"Open MPI", "OpenRTE", "PRRTE"}) {
    if (version.find(known) != std::string::npos) return;
  }
  fail(ErrorCode::kUnsupported, path + " isn't Open MPI's", "its flags are others",
       "Put Open MPI's mpirun first on PATH.");
}

int launch(const std::vector<std::string>& arguments) {
  const LaunchOptions options = read_launch_options(arguments);
  if (options.help) {
    std::fputs(launch_help().c_str(), stdout);
    return 0;
  }
  const LaunchCommand command = make_launch_command(options);
  if (options.dry_run) {
    fmt::print(stderr, "# {}\n", command.summary);
    fmt::print("{}\n", command.text());
    return 0;
  }
  check_command(command);
  return supervise(command);
}

}  // namespace

int launch_main(const std::vector<std::string>& arguments) {
  try {
    const int code = launch(arguments);
    if (std::fflush(stdout) == 0) return code;
    fail(ErrorCode::kFile, "the text can't be written to stdout", "it takes nothing",
         "Redirect stdout to a file that can be written.");
  } catch (...) {
    const Error error = as_error(std::current_exception());
    print_launch_error(error.what());
    return static_cast<int>(error.code());
  }
}

std::string launch_help() {
  return "Usage: ringattn launch [OPTIONS] SUBCOMMAND [FLAGS of ringattn]\n"
         "       launch/ringattn-mpirun, which finds ringattn, takes the same\n"
         "\n"
         "Examples:\n"
         "  ringattn launch run --synthetic 7 --seq 2m                    # as many ranks as this host has GPUs\n"
         "  ringattn launch -np 4 verify --synthetic 7                    # four ranks, GPUs or not\n"
         "  ringattn launch --hostfile hosts run --input qkv.safetensors  # as many ranks as the file has slots\n"
         "  ringattn launch --dry-run run --synthetic 7                   # prints the command and stops\n"
         "\n"
         "Starts ringattn under mpirun (Open MPI 4.1 or newer) or srun, one rank a GPU, and passes its exit code on.\n"
         "\n"
         "Options, all before the subcommand:\n" +
         launch_options_help() +
         R"(
Chosen here, unless set by these options or in the environment:
  ranks       one for each GPU that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves; on a host without a GPU 1
  program     $RINGATTN_PROGRAM, or this one
  binding     a NUMA node for more than two ranks where the GPUs lie as the ranks would, else none: mpirun would
              bind one or two ranks to a core each
  ranks > cores                  --oversubscribe
  as root                        OMPI_ALLOW_RUN_AS_ROOT=1, OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  in a container                 OMPI_MCA_btl_vader_single_copy_mechanism=none: such kernels often refuse it
  NCCL_NVLS_ENABLE=0             no NVLink multicast
  OMPI_MCA_oob_tcp_keepalive_*   mpirun notices a lost host soon after --timeout + 5 s, not after 8 minutes
  exported to all hosts          RINGATTN_*, NCCL_*, OMP_*, CUDA_VISIBLE_DEVICES, LD_LIBRARY_PATH
  RINGATTN_STORE_SECRET          with RINGATTN_STORE, 32 random bytes that only this job's ranks are told; none where it
                                 is set to nothing. It stands in no command: ps doesn't show it

Exit codes: ringattn's own, 0 to 7, as they are; 6 when a rank was killed, left early, never began or did not end, or a
host was lost; 2 for these options; 3 for the hostfile, TMPDIR, and a stdout that doesn't take what the job prints; 4
when mpirun itself failed; 128 + the signal when the launcher was told to stop, 143 when mpirun was. `ringattn --help`
lists ringattn's. The ranks say how they end: nothing is read out of what is printed.

The job ends with the launcher, however that ends, and the launcher with its ranks: mpirun gets 4 s after a rank has
failed, 10 s after all ranks of this host are gone or a signal was passed on, and --start-limit until a rank begins; and
a rank --timeout + 5 s after the job is done on all of them. Then mpirun is ended, with all that it has left on this
host. Daemons on other hosts end when their connection to mpirun does; on a host whose link was cut, as soon as the link
is back, or when that host's system gives the connection up.
)";
}

}  // namespace ringattn::launcher
