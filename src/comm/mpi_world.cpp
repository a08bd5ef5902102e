// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_world.hpp"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/threads.hpp"
#include "comm/launcher.hpp"
#include "comm/message_claim.hpp"
#include "comm/mpi_arrival.hpp"
#include "comm/mpi_calls.hpp"
#include "comm/mpi_heartbeat_channel.hpp"
#include "comm/mpi_internal.hpp"
#include "comm/process_world.hpp"
#include "comm/timeouts.hpp"

namespace ringattn {

namespace {

// What Open MPI starts of its own, and a few more.
constexpr int kThreadsOfMpi = 4;

class MpiRanks final : public ProcessRanks {
 public:
  int rank() const override { return launched_rank().value_or(0); }
  std::string name() const override { return "MPI"; }
  // MPI starts slowly on a busy host, and gives no signs meanwhile. With the longest turn, which comes where ranks 0
  // and 1 don't, it stays below the 5 s after the time limit within which that is noticed.
  double start_grace() const override { return 2.2; }

  void start() override {
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

  // Ranks that give up at the same time and can't agree on who prints take turns: one prints and ends, and mpirun ends
  // the others before it is theirs. Rank 0 is there most of the time, and else rank 1. mpirun wakes ranks by SIGCONT
  // and sleeps for 1 s before it sends SIGTERM.
  double print_delay() const override { return 1.3 * std::min(rank(), 2); }
  // All others share a turn. On one host the first of them prints alone; several hosts may have one such rank each.
  bool may_print() override { return claim_.try_claim(); }

  void end_all(int, int status) override { mpi().abort(mpi().comm_world, status); }

  // It ends this process too. Should it not manage to, this one still leaves with its code.
  void await_printer() override { std::this_thread::sleep_for(std::chrono::seconds(4)); }

 private:
  const MessageClaim claim_;
};

}  // namespace

int run_mpi_world(const WorldRequest& request, const Error* refusal, const std::function<int(Transport&)>& rank_main,
                  const std::function<void(const Error&)>& print_error) {
  // MPI would leave with code 1, a wrong result's, where it gets no threads.
  try_threads(kThreadsOfMpi, "Use fewer ranks on this host, or raise the limit on this user's processes (ulimit -u).");
  MpiRanks ranks;
  return run_process_world(ranks, request, refusal, rank_main, print_error);
}

}  // namespace ringattn
