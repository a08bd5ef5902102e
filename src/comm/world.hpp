// SPDX-License-Identifier: Apache-2.0
// The table of transports, and how programs start a world: checks whether a transport can be used, and runs a rank's
// main function in the chosen world.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "comm/transport.hpp"

namespace ringattn {

// One row per transport.
struct TransportRow {
  std::string_view name;         // "self", "threads", "mpi"
  std::string_view memory;       // "any", "host", "device"
  std::string_view description;  // one line for the documentation
  Route route;                   // of the worlds that run_world() makes with it
  // Why this process can't use it; an empty string if it can.
  std::string (*unavailable)();
};

std::span<const TransportRow> transport_table();

// The kind of memory that the job's kernel works on.
enum class WantedMemory { kAny, kHost, kDevice };

struct WorldRequest {
  std::string transport = "auto";
  std::optional<int> ranks;  // number of ranks (threads) in this process
  WantedMemory memory = WantedMemory::kAny;
  double pace = 0.0;      // bytes per second of a host transport (comm/paced.hpp); 0: unlimited
  double timeout = 60.0;  // seconds without a heartbeat until a rank is silent and the others fail with kPeer
  // Called on every rank, collectively and over host memory, before any collective call that depends on the request. It
  // should compare the ranks' requests and throw an AgreedError if they differ. Ranks with different requests would
  // otherwise wait for each other in different calls.
  std::function<void(Bootstrap& world)> compare;
  // Called on one rank before the ranks are connected, with a warning for the user, such as that any process may join.
  std::function<void(const MessageTemplate& warning)> warn;
  // Called once per process, before any rank begins, with the chosen transport and why it is not another one.
  std::function<void(std::string_view transport, const MessageTemplate& reason)> chosen;
};

// Makes the world and runs `rank_main` on each rank. If RINGATTN_STORE is set, the ranks are the processes that connect
// there. Under mpirun they are mpirun's. Otherwise there are `ranks` threads, or a single rank. Ranks get a device
// transport if each can have a GPU (ranks of one process may share GPUs), unless the request forces another transport
// or host memory.
//
// Ends the world and returns the exit code, the same on every rank: the highest that rank_main returned. An Error that
// rank_main throws determines the code. An AgreedError is thrown on all ranks and ends the world in order. Any other
// Error aborts the other ranks. Exactly one rank calls `print_error`. Throws kUsage for an unknown or contradictory
// request, and kUnsupported for a transport that can't be used here.
int run_world(const WorldRequest& request, const std::function<int(Transport&)>& rank_main,
              const std::function<void(const Error&)>& print_error);

// Ends a program that failed before it had a world (bad flags, a refused request) and returns its exit code. Under
// mpirun, or at RINGATTN_STORE, the ranks connect: one of them prints, none exits before it has, and ranks that did not
// fail end with the same code from run_world(). A rank that can't connect prints by itself. Under mpirun only one such
// rank of each host prints.
int end_without_world(const Error& error, const std::function<void(const Error&)>& print_error);

}  // namespace ringattn
