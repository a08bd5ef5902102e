// SPDX-License-Identifier: Apache-2.0
// The table of transports, and the start of a world for programs: which transports there are, why one can't be used
// here, and running a rank's main function in the chosen world.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "comm/transport.hpp"

namespace ringattn {

// A transport = one row.
struct TransportRow {
  std::string_view name;         // "self", "threads", "mpi"
  std::string_view memory;       // "any", "host", "device"
  std::string_view description;  // one line for people
  Route route;                   // of the worlds that run_world() makes with it
  // Why it can't be used in this process; empty: it can.
  std::string (*unavailable)();
};

std::span<const TransportRow> transport_table();

// The kind of memory that the job's kernel works in.
enum class WantedMemory { kAny, kHost, kDevice };

struct WorldRequest {
  std::string transport = "auto";
  std::optional<int> ranks;  // ranks in this process
  WantedMemory memory = WantedMemory::kAny;
  double pace = 0.0;      // bytes per second of a host transport; 0: as fast as it goes (comm/paced.hpp)
  double timeout = 60.0;  // seconds without a sign of life, after which a rank is silent and the others end with kPeer
  // Called on every rank, collectively and over host memory, before anything that depends on the request makes the
  // ranks meet: the place to refuse, with an AgreedError, ranks whose requests differ. Ranks with different requests
  // would otherwise wait for each other in different calls.
  std::function<void(Bootstrap& world)> compare;
  // Told, on one rank before the others have come, what its user should know of: that whoever connects may join.
  std::function<void(const MessageTemplate& warning)> warn;
  // Told the name of the transport and why it is not another one, once in each process, before any rank begins.
  std::function<void(std::string_view transport, const MessageTemplate& reason)> chosen;
};

// Makes the world (where RINGATTN_STORE is set: of the processes that meet there; under mpirun: mpirun's; otherwise
// `ranks` threads, or one rank alone). Unless the request forces a transport or host memory, ranks that can have a GPU
// each (ranks of one process: share them) get a device transport. Runs `rank_main` once a rank, ends the world and
// returns the exit code, the same on every rank: the highest that rank_main returned. An Error that rank_main throws
// becomes the code: an AgreedError is known to all and ends the world in order, any other aborts the other ranks.
// Exactly one rank calls `print_error`. Throws kUsage for an unknown or contradictory request, kUnsupported for a
// transport that can't be used here.
int run_world(const WorldRequest& request, const std::function<int(Transport&)>& rank_main,
              const std::function<void(const Error&)>& print_error);

// Ends a program that failed before it had a world (bad flags, a refused request) and returns its exit code. Under
// mpirun, or at RINGATTN_STORE, the ranks meet: one of them prints, none leaves before it has, and ranks that did not
// fail end with the same code out of run_world(). A rank that can't meet the others prints by itself; under mpirun one
// of each host's does.
int end_without_world(const Error& error, const std::function<void(const Error&)>& print_error);

}  // namespace ringattn
