// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_world.hpp"

#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "base/end_process.hpp"
#include "base/moment.hpp"
#include "base/outcome.hpp"
#include "base/pulse.hpp"
#include "base/threads.hpp"
#include "comm/device_world.hpp"
#include "comm/failure.hpp"
#include "comm/launcher.hpp"
#include "comm/mpi.hpp"
#include "comm/mpi_abort.hpp"
#include "comm/mpi_heart.hpp"
#include "comm/paced.hpp"
#include "comm/patience.hpp"
#include "comm/watch.hpp"

namespace ringattn {

namespace {

using Seconds = std::chrono::duration<double>;

// What Open MPI starts of its own, and a few more.
constexpr int kThreadsOfMpi = 4;

// MPI starts slowly on a busy host, and gives no signs meanwhile.
constexpr Seconds kStartGrace{4.0};

// A rank that hangs is left to its peers first, who can name it and agree on who prints.
constexpr Seconds kPeersFirst{1.0};

// Ranks that give up at the same time and can't agree on who prints take turns: one prints and ends, and mpirun ends
// the others before it is theirs. Rank 0 is there most of the time, and else rank 1.
Seconds turn(int rank) { return Seconds(1.2 * std::min(rank, 3)); }

// A rank's life from before MPI_Init to after MPI_Finalize: its pulse, and the watch that ends the process where the
// rank's own thread can't.
class MpiProgram {
 public:
  MpiProgram(double seconds, const std::function<void(const Error&)>& print_error)
      : seconds_(seconds),
        print_error_(print_error),
        heart_(launched_rank().value_or(0), seconds, [this](const Error& error) { watch_.arm(error); }),
        watch_({&heart_},
               {seconds, [this](const Pulse&) { end_stuck(); }, [this](const Error& error) { end_late(error); }}),
        scope_(heart_) {
    enter(Phase::kStart);
  }

  // What the process does, for the watch and its messages.
  enum class Phase { kStart, kJob, kEnd };

  MpiHeart& heart() { return heart_; }

  // Only a rank's own work on the processor is a sign of life, not the polling inside MPI where it starts and ends.
  void enter(Phase phase) {
    phase_ = phase;
    watch_.set_processor_counts(phase == Phase::kJob);
    watch_.set_grace(phase == Phase::kStart ? kStartGrace.count() : 0.0);
    look();
  }

  // Ends the world from a rank that failed alone, or that has heard of such a rank. Without a transport there is nobody
  // to agree with on who prints.
  [[noreturn]] void end_alone(Transport* world, const Error& error) {
    const int code = static_cast<int>(error.code());
    const int status = end_outcome(code);  // now: what follows may hang, and MPI_Abort doesn't come back
    watch_.arm(error);
    if (world == nullptr) std::this_thread::sleep_for(turn(heart_.rank()));
    told_ = true;
    if (world == nullptr || world->abort(error)) {
      print_error_(world == nullptr ? error : lone_error(world->rank(), error));
      flush_output();
      MPI_Abort(MPI_COMM_WORLD, status);
    }
    // The rank that prints ends this process too. Should it not manage to, this one still leaves with its code.
    int final_code = code;
    try {
      if (world != nullptr) world->progress();
    } catch (const Error& first) {
      final_code = static_cast<int>(first.code());
    }
    std::this_thread::sleep_for(kPrinterGrace);
    end_process(final_code);
  }

 private:
  // How long the rank that prints gets to end the others.
  static constexpr std::chrono::seconds kPrinterGrace{4};

  // This rank's own thread hangs.
  [[noreturn]] void end_stuck() {
    std::this_thread::sleep_for(turn(heart_.rank()) + (phase_ == Phase::kJob ? kPeersFirst : Seconds(0.0)));
    const int stuck[] = {heart_.rank()};
    Error error = silent_error(RankNames(), stuck, seconds_);
    if (phase_ == Phase::kStart) {
      error = Error(ErrorCode::kPeer, fmt::format("MPI did not start within {:g} s", seconds_), "a rank has not come",
                    "Check that all ranks run the same command, and that their hosts answer.");
    } else if (phase_ == Phase::kEnd) {
      error = Error(ErrorCode::kPeer, fmt::format("MPI did not end within {:g} s", seconds_),
                    "a rank was stopped or lost when the job was done and its files were complete",
                    "See whether all hosts answer.");
    }
    end_with(error, print_error_);
  }

  // A failure has not ended this process.
  [[noreturn]] void end_late(const Error& error) {
    if (!told_) end_with(error, print_error_);
    end_process(static_cast<int>(error.code()));
  }

  const double seconds_;
  const std::function<void(const Error&)>& print_error_;
  std::atomic<Phase> phase_{Phase::kStart};
  std::atomic<bool> told_{false};  // that it failed: the ranks agree on who prints
  MpiHeart heart_;
  Watch watch_;
  PulseScope scope_;
};

// The highest code of all ranks.
int meet_to_end(Transport& world, int code, const Deadline& deadline) {
  for (const std::string& theirs : world.all_gather(std::to_string(code), deadline)) {
    code = std::max(code, std::atoi(theirs.c_str()));
  }
  return code;
}

}  // namespace

int run_mpi_world(const WorldRequest& request, const Error* refusal, const std::function<int(Transport&)>& rank_main,
                  const std::function<void(const Error&)>& print_error) {
  // MPI would leave with code 1, a wrong result's, where it gets no threads.
  try_threads(kThreadsOfMpi, "Use fewer ranks on this host, or raise the limit on this user's processes (ulimit -u).");
  MpiProgram program(request.timeout, print_error);
  moment("init");
  int provided = MPI_THREAD_SINGLE;
  if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS) {
    fail(ErrorCode::kUnsupported, "can't start MPI", "MPI_Init_thread failed",
         "See MPI's own message, or run without mpirun.");
  }
  int code = 0;
  std::unique_ptr<Transport> world;
  try {
    moment("bootstrap");
    MpiOptions options;
    options.setup_seconds = request.timeout;
    world = make_mpi_transport(MPI_COMM_WORLD, options);
    program.heart().start(world->all_gather(processor_name(), Patience(request.timeout).for_peer()));
    program.enter(MpiProgram::Phase::kJob);
    if (request.pace > 0.0) world = make_paced_transport(std::move(world), request.pace);
    try {
      agree(*world, refusal, Patience(request.timeout).for_peer());
      if (refusal == nullptr && request.compare) request.compare(*world);
      DeviceWorld device;
      if (refusal == nullptr) device = make_device_world(*world, request);
      Transport& chosen = device.transport ? *device.transport : *world;
      if (refusal == nullptr && request.chosen) request.chosen(chosen.name(), device.reason);
      code = rank_main(chosen);
    } catch (const AgreedError& error) {
      if (world->rank() == 0) print_error(error);
      flush_output();
      code = static_cast<int>(error.code());
    }
    moment("last-meeting");
    code = meet_to_end(*world, code, Patience(request.timeout).for_peer());
    moment("parting");
    program.heart().part();
    // A rank that was stopped until the others gave it up must not go on to MPI_Finalize while mpirun ends them all.
    world->progress();
  } catch (...) {
    program.end_alone(world.get(), as_error(std::current_exception()));
  }
  program.enter(MpiProgram::Phase::kEnd);
  moment("exit");
  world.reset();
  MPI_Finalize();
  return code;
}

}  // namespace ringattn
