// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_world.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

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

// Open MPI ends the process with code 1, the code of a wrong result, if it can't make the folder of its session. Ranks
// that mpirun started use mpirun's folder.
void check_temporary_folder() {
  const char* const folder = std::getenv("TMPDIR");
  std::string path = std::string(folder == nullptr ? "/tmp" : folder) + "/ringattn-XXXXXX";
  if (::mkdtemp(path.data()) == nullptr) {
    fail(ErrorCode::kUnsupported, "can't start MPI",
         fmt::format("{} takes no temporary folder: {}", folder == nullptr ? "/tmp" : folder, std::strerror(errno)),
         "Set TMPDIR to a folder that can be written.");
  }
  ::rmdir(path.c_str());
}

class MpiRanks final : public ProcessRanks {
 public:
  int rank() const override { return launched_rank().value_or(0); }
  std::string name() const override { return "MPI"; }
  // MPI starts slowly on a busy host, and sends no heartbeats meanwhile. Together with the longest print_delay(), the
  // grace stays below the 5 s after the time limit within which a failure must be reported.
  double start_grace() const override { return 2.2; }

  void start() override {
    if (std::getenv("PMIX_SERVER_TMPDIR") == nullptr) check_temporary_folder();
    int provided = MPI_THREAD_SINGLE;
    if (mpi().init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS) {
      fail(ErrorCode::kUnsupported, "can't start MPI", "MPI_Init_thread failed",
           "See MPI's own message, or run without mpirun.");
    }
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
