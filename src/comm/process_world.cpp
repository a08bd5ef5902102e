// SPDX-License-Identifier: Apache-2.0
#include "comm/process_world.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "base/failpoint.hpp"
#include "base/outcome.hpp"
#include "base/rank_liveness.hpp"
#include "comm/device_world.hpp"
#include "comm/failure.hpp"
#include "comm/paced.hpp"
#include "comm/timeouts.hpp"
#include "comm/watchdog.hpp"

namespace ringattn {

namespace {

using Seconds = std::chrono::duration<double>;

// The peers of a rank that hangs get this long to name it and to agree on who prints.
constexpr Seconds kPeersFirst{1.0};
// How long a rank that can't begin tries to tell the others.
constexpr double kRefusalSeconds = 10.0;
// How often the watchdog polls while the ranks start. The print delays end so close to the promised limit that a longer
// tick would exceed it. The watchdog measures no work during the start.
constexpr double kStartTick = 0.05;

// The lifetime of a rank's process from before the ranks start until after they have left. It owns the rank's liveness,
// and the watchdog that ends the process when the rank's own thread can't.
class Program {
 public:
  Program(ProcessRanks& ranks, double seconds, const Error* refusal,
          const std::function<void(const Error&)>& print_error)
      : ranks_(ranks),
        seconds_(seconds),
        refusal_(refusal),
        print_error_(print_error),
        monitor_(ranks.rank(), seconds, [this](const Error& error) { watchdog_.arm(error); }),
        watchdog_({&monitor_}, {seconds, [this](const RankLiveness&) { end_stuck(); },
                                [this](const Error& error) { end_late(error); }}),
        scope_(monitor_) {
    enter(Phase::kStart);
  }

  // The phase of the process, for the watchdog and its messages.
  enum class Phase { kStart, kJob, kEnd };

  HeartbeatMonitor& monitor() { return monitor_; }

  // CPU time counts as progress only during the job, because ranks poll while they start and end.
  void enter(Phase phase) {
    phase_ = phase;
    watchdog_.set_processor_counts(phase == Phase::kJob);
    const double tick = Watchdog::interval(seconds_);
    if (phase == Phase::kStart) {
      watchdog_.set_grace(ranks_.start_grace(), std::min(tick, kStartTick));
    } else {
      watchdog_.set_grace(0.0, tick);
    }
    waiting_heartbeat();
  }

  // Another rank has failed, and this one may not poll for a while.
  void hear(const Error& error) { watchdog_.arm(error); }

  // Ends the world from a rank that failed outside a collective phase, or that has heard of such a rank. Without a
  // transport the ranks can't agree on who prints.
  [[noreturn]] void end_alone(Transport* world, const Error& error) {
    const int code = static_cast<int>(error.code());
    const int status = end_outcome(code);  // now, because what follows may hang, and MPI_Abort doesn't return
    watchdog_.arm(error);
    if (world == nullptr) std::this_thread::sleep_for(Seconds(ranks_.print_delay()));
    reported_ = true;
    if ((world == nullptr ? !is_heard(error) : world->abort(error)) && ranks_.may_print()) {
      print_error_(world == nullptr ? error : lone_error(world->rank(), error));
      flush_output();
      ranks_.end_all(code, status);
    }
    int final_code = code;
    try {
      if (world != nullptr) world->progress();
    } catch (const Error& first) {
      final_code = static_cast<int>(first.code());
    }
    ranks_.await_printer();
    end_process(final_code);
  }

  // Returns true if the error comes from another rank, which prints it.
  bool is_heard(const Error& error) const {
    return error.location() != nullptr && error.location()->rank != monitor_.rank();
  }

 private:
  // Called by the watchdog when this rank's own thread hangs.
  [[noreturn]] void end_stuck() {
    std::this_thread::sleep_for(Seconds(ranks_.print_delay()) + (phase_ == Phase::kJob ? kPeersFirst : Seconds(0.0)));
    const int stuck[] = {monitor_.rank()};
    Error error = silent_error(RankNames(), stuck, seconds_);
    if (phase_ == Phase::kStart && refusal_ != nullptr) {
      error = *refusal_;
    } else if (phase_ == Phase::kStart) {
      error = Error(ErrorCode::kPeer, fmt::format("{} did not start within {:g} s", ranks_.name(), seconds_),
                    "a rank has not come", "Check that all ranks run the same command, and that their hosts answer.");
    } else if (phase_ == Phase::kEnd) {
      error = Error(ErrorCode::kPeer, fmt::format("{} did not end within {:g} s", ranks_.name(), seconds_),
                    "a rank was stopped or lost when the job was done and its files were complete",
                    "See whether all hosts answer.");
    }
    if (ranks_.may_print()) end_with(error, print_error_);
    ranks_.await_printer();
    end_process(static_cast<int>(error.code()));
  }

  // Called by the watchdog when a failure has not ended this process in time.
  [[noreturn]] void end_late(const Error& error) {
    if (!reported_ && !is_heard(error) && ranks_.may_print()) end_with(error, print_error_);
    end_process(static_cast<int>(error.code()));
  }

  ProcessRanks& ranks_;
  const double seconds_;
  const Error* const refusal_;
  const std::function<void(const Error&)>& print_error_;
  std::atomic<Phase> phase_{Phase::kStart};
  std::atomic<bool> reported_{false};  // this rank has reported its failure, and the ranks agree on who prints
  HeartbeatMonitor monitor_;
  Watchdog watchdog_;
  RankLivenessScope scope_;
};

// The highest exit code of all ranks.
int gather_exit_codes(Transport& world, int code, const Deadline& deadline) {
  for (const std::string& theirs : world.all_gather(std::to_string(code), deadline)) {
    constexpr auto kMaxCode = static_cast<int>(ErrorCode::kInternal);
    const bool known = theirs.size() == 1 && theirs[0] >= '0' && theirs[0] <= '0' + kMaxCode;
    code = std::max(code, known ? theirs[0] - '0' : static_cast<int>(ErrorCode::kPeer));
  }
  return code;
}

}  // namespace

int run_process_world(ProcessRanks& ranks, const WorldRequest& asked, const Error* refusal,
                      const std::function<int(Transport&)>& rank_main,
                      const std::function<void(const Error&)>& print_error) {
  WorldRequest request = asked;
  if (refusal != nullptr) request.timeout = std::min(request.timeout, kRefusalSeconds);
  Program program(ranks, request.timeout, refusal, print_error);
  failpoint("init");
  ranks.start();
  int code = 0;
  std::unique_ptr<Transport> world;
  try {
    failpoint("bootstrap");
    ProcessRanks::Joined joined = ranks.join(request, [&program](const Error& error) { program.hear(error); });
    world = std::move(joined.world);
    program.monitor().start(std::move(joined.channel), std::move(joined.hosts));
    program.enter(Program::Phase::kJob);
    if (request.pace > 0.0) world = make_paced_transport(std::move(world), request.pace);
    try {
      agree(*world, refusal, Timeouts(request.timeout).for_peer());
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
    failpoint("last-collective");
    code = gather_exit_codes(*world, code, Timeouts(request.timeout).for_peer());
    failpoint("leaving");
    program.monitor().leave();
    // A rank that was stopped until the others gave up on it must not leave as if nothing had happened.
    world->progress();
  } catch (...) {
    const Error error = as_error(std::current_exception());
    // If the ranks did not connect, a rank with a refusal reports the refusal instead.
    program.end_alone(world.get(),
                      world == nullptr && refusal != nullptr && !program.is_heard(error) ? *refusal : error);
  }
  program.enter(Program::Phase::kEnd);
  leave_outcome(request.timeout);
  failpoint("exit");
  world.reset();
  ranks.leave();
  failpoint("left");
  return code;
}

}  // namespace ringattn
