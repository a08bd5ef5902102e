// SPDX-License-Identifier: Apache-2.0
// Implements what run_world() promises for ranks that are processes: one exit code, one message, and never a hang.
// ProcessRanks covers the differences between MPI and the store (comm/tcp/store.hpp): how ranks connect, and how one
// ends the others.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/heartbeat_monitor.hpp"
#include "comm/world.hpp"

namespace ringattn {

class ProcessRanks {
 public:
  virtual ~ProcessRanks() = default;

  // This rank's number according to its launcher.
  virtual int rank() const = 0;
  // The name in messages of what starts and ends: "MPI".
  virtual std::string name() const = 0;
  // Seconds beyond the time limit that a start without heartbeats may take before it is a failure.
  virtual double start_grace() const = 0;

  // Setup before the ranks are connected. Throws if this process can't take part at all.
  virtual void start() = 0;
  struct Joined {
    std::unique_ptr<Transport> world;
    std::unique_ptr<HeartbeatChannel> channel;
    std::vector<std::string> hosts;
  };
  // Makes the world. Collective. If the world can report other ranks' failures while this one computes, it calls
  // `on_failure`. Every rank prints an error that join() throws, except ranks whose error has the location of another
  // rank, which prints it.
  virtual Joined join(const WorldRequest& request, std::function<void(const Error&)> on_failure) = 0;
  // Called after the last collective, once the world is destroyed.
  virtual void leave() = 0;

  // Seconds to wait before a rank prints without an agreement on who prints. Another rank may end it meanwhile.
  virtual double print_delay() const = 0;
  // Returns true if this rank may print a failure. If ranks can coordinate, only the first that asks may.
  virtual bool may_print() { return true; }
  // Ends this process, and the others if it can, after this rank has printed. `status` is the exit status that stands
  // for `code` (base/outcome.hpp), for implementations that don't call end_process().
  virtual void end_all(int code, int status) = 0;
  // Waits until the printing rank has printed, a few seconds at most.
  virtual void await_printer() = 0;
};

// Starts this rank, lets the ranks agree that they can begin (not if this one has a `refusal`), runs rank_main, ends
// the world as run_world() promises, and returns the exit code. Does not return if a rank failed outside a collective
// phase. A rank with a refusal prints it by itself if the other ranks can't be told within seconds.
int run_process_world(ProcessRanks& ranks, const WorldRequest& asked, const Error* refusal,
                      const std::function<int(Transport&)>& rank_main,
                      const std::function<void(const Error&)>& print_error);

}  // namespace ringattn
