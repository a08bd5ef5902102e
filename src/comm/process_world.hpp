// SPDX-License-Identifier: Apache-2.0
// What run_world() promises, for ranks that are processes: one exit code, one message, never a hang. How they come
// together, and how one of them ends the others, is what MPI and the store (comm/tcp/store.hpp) differ in.
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

  // This rank's number, as its launcher says.
  virtual int rank() const = 0;
  // What starts and ends, in messages: "MPI".
  virtual std::string name() const = 0;
  // So much later than the time limit is a start that gives no signs of life a failure.
  virtual double start_grace() const = 0;

  // What comes before the ranks know each other. Throws where this process can't take part at all.
  virtual void start() = 0;
  struct Joined {
    std::unique_ptr<Transport> world;
    std::unique_ptr<HeartbeatChannel> channel;
    std::vector<std::string> hosts;
  };
  // Makes the world. Collective. `on_failure` hears of other ranks' failures while this one computes, where it can be
  // told. An error that it throws is printed on every rank but those to which its place says that another one prints
  // it.
  virtual Joined join(const WorldRequest& request, std::function<void(const Error&)> on_failure) = 0;
  // After the last collective, once the world is gone.
  virtual void leave() = 0;

  // Before a rank that could not agree on who prints does: seconds in which others may have ended it.
  virtual double print_delay() const = 0;
  // Whether this rank may print a failure: where ranks share something that tells, only the first of them to ask may.
  virtual bool may_print() { return true; }
  // Ends this process, and the others if it can. This rank has printed. `status` is the exit status that says `code`
  // (base/outcome.hpp), for those who end the process by other means than end_process().
  virtual void end_all(int code, int status) = 0;
  // Until the rank that prints has, a few seconds at most.
  virtual void await_printer() = 0;
};

// Starts, lets the ranks agree that they can begin (not if this one has a `refusal`), runs rank_main, ends the world as
// run_world() promises, and returns the code. Does not return where a rank failed alone. A rank with a refusal says so
// by itself where the others don't come to hear it within seconds.
int run_process_world(ProcessRanks& ranks, const WorldRequest& asked, const Error* refusal,
                      const std::function<int(Transport&)>& rank_main,
                      const std::function<void(const Error&)>& print_error);

}  // namespace ringattn
