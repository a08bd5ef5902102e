// SPDX-License-Identifier: Apache-2.0
// The errors that transports throw: the names of ranks, errors of a passed deadline and of a silent rank, and a peer's
// abort().
#pragma once

#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/deadline.hpp"
#include "base/error.hpp"
#include "comm/transport.hpp"

namespace ringattn {

// "rank 3 on node7", or "rank 3" if all ranks share a host.
class RankNames {
 public:
  RankNames() = default;
  explicit RankNames(std::vector<std::string> hosts) : hosts_(std::move(hosts)) {}

  std::string name(int rank) const;
  std::string host(int rank) const;
  // "rank 3 on node7, rank 5 on node9". Long lists end with a count.
  std::string list(std::span<const int> ranks) const;

 private:
  std::vector<std::string> hosts_;  // [ranks], or empty
};

// Throws kPeer: `rank` gave up on `what` ("block 3 of 12", "barrier") while it waited for `awaited`.
[[noreturn]] void fail_late(std::string_view what, const Deadline& deadline, const RankNames& names, int rank,
                            std::span<const int> awaited);

// The error that all calls of a world throw (kPeer) once `silent` ranks have sent no heartbeat for `seconds`.
Error silent_error(const RankNames& names, std::span<const int> silent, double seconds);

// Call it in an exception handler, before the stack unwinds further: it reports the current exception to the calling
// rank's liveness. The rank then has seconds left to fail in order (comm/watchdog.hpp).
void note_failure() noexcept;

// The error with a location. `prefix` names the location and is placed before the message.
Error error_at_location(const Error& error, ErrorLocation location, std::string_view prefix);

// The error that all calls of a world throw once `rank` has aborted it with `error`: the same error with its location.
Error aborted_error(const RankNames& names, int rank, const Error& error);

// The error that `rank`, one of several, prints if it failed and the others did not. Failed waits name their ranks
// themselves.
Error lone_error(int rank, const Error& error);

// Returns true if `bytes` from another rank start like the output of pack_error(). Check this before unpack_error(),
// which accepts any bytes: other bytes come from a process that is not a rank of this build.
bool is_packed_error(std::string_view bytes);

// Converts any exception to an Error: a failed allocation becomes kMemory, a thread that can't be started kUnsupported,
// and any other exception kInternal.
Error as_error(const std::exception_ptr& exception);

}  // namespace ringattn
