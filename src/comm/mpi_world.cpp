// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_world.hpp"

#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/end_process.hpp"
#include "base/threads.hpp"
#include "comm/device_world.hpp"
#include "comm/failure.hpp"
#include "comm/launcher.hpp"
#include "comm/mpi.hpp"
#include "comm/paced.hpp"
#include "comm/patience.hpp"

namespace ringattn {

namespace {

// A process that is being ended leaves by itself after this, whatever hangs.
constexpr std::chrono::seconds kEndGrace{5};

// What Open MPI starts of its own, and a few more.
constexpr int kThreadsOfMpi = 4;

void flush_output() {
  std::cout.flush();
  std::cerr.flush();
  std::fflush(nullptr);
}

// Ends the world from a rank that failed alone, or that has heard of such a rank. Without a transport there is nobody
// to agree with on who prints.
[[noreturn]] void end_alone(Transport* world, const Error& error,
                            const std::function<void(const Error&)>& print_error) {
  const int code = static_cast<int>(error.code());
  std::thread([code] {
    std::this_thread::sleep_for(kEndGrace);
    end_process(code);
  }).detach();
  if (world == nullptr || world->abort(error)) {
    print_error(world == nullptr ? error : lone_error(world->rank(), error));
    flush_output();
    MPI_Abort(MPI_COMM_WORLD, code);
  }
  // The rank that prints ends this process too. Should it not manage to, this one still leaves with its code.
  int final_code = code;
  try {
    if (world != nullptr) world->progress();
  } catch (const Error& first) {
    final_code = static_cast<int>(first.code());
  }
  std::this_thread::sleep_for(kEndGrace);
  end_process(final_code);
}

// The highest code of all ranks. Also makes sure, with a deadline, that MPI_Finalize finds everybody there.
int meet_to_end(Transport& world, int code, const Deadline& deadline) {
  for (const std::string& theirs : world.all_gather(std::to_string(code), deadline)) {
    code = std::max(code, std::atoi(theirs.c_str()));
  }
  return code;
}

// MPI_Init and the first communicator have no deadline of their own: ends the process when they outlast `seconds`, as
// they do where a rank is stopped or runs another program.
class StartWatch {
 public:
  StartWatch(double seconds, const std::function<void(const Error&)>& print_error)
      : thread_([this, seconds, &print_error] {
          // A little apart, so that one rank prints, and mpirun then ends the others.
          const std::chrono::duration<double> patience(seconds + 0.1 * std::min(launched_rank().value_or(0), 20));
          std::unique_lock lock(mutex_);
          if (ended_.wait_for(lock, patience, [this] { return started_; })) return;
          print_error(Error(ErrorCode::kPeer, fmt::format("MPI did not start within {} s", seconds),
                            "a rank has not come",
                            "Check that all ranks run the same command, and that their hosts answer."));
          flush_output();
          end_process(static_cast<int>(ErrorCode::kPeer));
        }) {}

  ~StartWatch() {
    {
      const std::lock_guard lock(mutex_);
      started_ = true;
    }
    ended_.notify_one();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool started_ = false;
  std::thread thread_;
};

}  // namespace

int run_mpi_world(const WorldRequest& request, const Error* refusal, const std::function<int(Transport&)>& rank_main,
                  const std::function<void(const Error&)>& print_error) {
  // MPI would leave with code 1, a wrong result's, where it gets no threads.
  try_threads(kThreadsOfMpi, "Use fewer ranks on this host, or raise the limit on this user's processes (ulimit -u).");
  auto watch = std::make_unique<StartWatch>(request.timeout, print_error);
  int provided = MPI_THREAD_SINGLE;
  if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS) {
    fail(ErrorCode::kUnsupported, "can't start MPI", "MPI_Init_thread failed",
         "See MPI's own message, or run without mpirun.");
  }
  int code = 0;
  std::unique_ptr<Transport> world;
  try {
    world = make_mpi_transport(MPI_COMM_WORLD);
    watch.reset();
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
    // Rank 0 may still be writing a report.
    code = meet_to_end(*world, code, Patience(request.timeout).for_work(Patience::kDisk));
  } catch (...) {
    end_alone(world.get(), as_error(std::current_exception()), print_error);
  }
  world.reset();
  MPI_Finalize();
  return code;
}

}  // namespace ringattn
