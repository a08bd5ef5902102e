// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_world.hpp"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>

#include "base/file_descriptor.hpp"
#include "base/outcome.hpp"
#include "base/threads.hpp"
#include "comm/launcher.hpp"
#include "comm/mpi_arrival.hpp"
#include "comm/mpi_calls.hpp"
#include "comm/mpi_heartbeat_channel.hpp"
#include "comm/mpi_internal.hpp"
#include "comm/process_world.hpp"
#include "comm/timeouts.hpp"

namespace ringattn {

namespace {

// Threads that Open MPI starts, plus a margin.
constexpr int kThreadsOfMpi = 4;

// Open MPI ends the process with code 1, the code of a wrong result, if it can't start: it has no folder for its
// session, too few files, or an unknown component. A process that mpirun or srun did not start as a rank tries it in a
// child process first.
void try_start() {
  if (std::getenv("PMIX_NAMESPACE") != nullptr || std::getenv("PMI_FD") != nullptr) return;
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    int provided = MPI_THREAD_SINGLE;
    const bool started = mpi().init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided) == MPI_SUCCESS;
    std::_Exit(started && mpi().finalize() == MPI_SUCCESS ? 0 : 1);
  }
  int status = 0;
  if (child > 0 && uninterrupted([&] { return ::waitpid(child, &status, 0); }) == child && status != 0) {
    fail(ErrorCode::kUnsupported, "can't start MPI", "MPI_Init failed; its own message is above",
         "Check that TMPDIR names a folder that can be written to, and the limits on files and processes (ulimit -a).");
  }
}

class MpiRanks final : public ProcessRanks {
 public:
  int rank() const override { return launched_rank().value_or(0); }
  std::string name() const override { return "MPI"; }
  // MPI starts slowly on a busy host, and sends no heartbeats meanwhile. Together with the longest print_delay(), the
  // grace stays below the 5 s after the time limit within which a failure must be reported.
  double start_grace() const override { return 2.2; }

  void start() override {
    try_start();
    start_outcome(false);
    int provided = MPI_THREAD_SINGLE;
    if (mpi().init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS) {
      fail(ErrorCode::kUnsupported, "can't start MPI", "MPI_Init_thread failed",
           "See MPI's own message, or run without mpirun.");
    }
    start_outcome(true);
  }

  Joined join(const WorldRequest& request, std::function<void(const Error&)>) override {
    MpiOptions options;
    options.setup_seconds = request.timeout;
    Joined joined;
    await_ranks(mpi().comm_world, Timeouts(request.timeout).for_peer());
    MpiWorld made = make_mpi_world(mpi().comm_world, options);
    joined.world = std::move(made.transport);
    joined.hosts = joined.world->all_gather(processor_name(), Timeouts(request.timeout).for_peer());
    joined.channel = make_mpi_heartbeat_channel(std::move(made.context));
    return joined;
  }

  void leave() override { mpi().finalize(); }

  // Ranks that give up at the same time and can't agree on who prints take turns. One prints and ends, and mpirun ends
  // the others before their turn. Rank 0 is usually there, otherwise rank 1. mpirun sends SIGCONT and waits 1 s before
  // it sends SIGTERM.
  double print_delay() const override { return 1.3 * std::min(rank(), 2); }
  // All other ranks share a turn. On one host only the first of them prints, but each of several hosts may have such a
  // rank.
  bool may_print() override { return claim_.try_claim(); }

  void end_all(int, int status) override { mpi().abort(mpi().comm_world, status); }

  // MPI_Abort ends this process too. If it fails to, this process exits with its own code.
  void await_printer() override { std::this_thread::sleep_for(std::chrono::seconds(4)); }

 private:
  const MessageClaim claim_;
};

}  // namespace

int run_mpi_world(const WorldRequest& request, const Error* refusal, const std::function<int(Transport&)>& rank_main,
                  const std::function<void(const Error&)>& print_error) {
  // MPI would exit with code 1, the code of a wrong result, if it got no threads.
  try_threads(kThreadsOfMpi, "Use fewer ranks on this host, or raise the limit on this user's processes (ulimit -u).");
  MpiRanks ranks;
  return run_process_world(ranks, request, refusal, rank_main, print_error);
}

}  // namespace ringattn
