// SPDX-License-Identifier: Apache-2.0
// How transports speak of failures: what ranks are called, what a passed deadline and a peer's abort() look like.
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

// "rank 3 on node7", or "rank 3" where all ranks share a host.
class RankNames {
 public:
  RankNames() = default;
  explicit RankNames(std::vector<std::string> hosts) : hosts_(std::move(hosts)) {}

  std::string name(int rank) const;
  std::string host(int rank) const;
  // "rank 3 on node7, rank 5 on node9", and a count where there are too many to list.
  std::string list(std::span<const int> ranks) const;

 private:
  std::vector<std::string> hosts_;  // [ranks], or empty
};

// Throws kPeer: `rank` gave up on `what` ("block 3 of 12", "barrier") while it waited for `awaited`.
[[noreturn]] void fail_late(std::string_view what, const Deadline& deadline, const RankNames& names, int rank,
                            std::span<const int> awaited);

// What the calls of a world throw (kPeer) once `silent` ranks have given no sign of life for `seconds`.
Error silent_error(const RankNames& names, std::span<const int> silent, double seconds);

// For handlers, before the stack unwinds further: the calling rank is going to fail with the exception in hand, and has
// seconds left to do so in order (comm/watchdog.hpp).
void note_failure() noexcept;

// The error with its location. Its message begins with `prefix`, which says the location in words.
Error error_at_location(const Error& error, ErrorLocation location, std::string_view prefix);

// What the calls of a world throw once `rank` has aborted it with `error`: the same, with its location.
Error aborted_error(const RankNames& names, int rank, const Error& error);

// What `rank`, of several, prints where it failed alone. Failed waits name their ranks themselves.
Error lone_error(int rank, const Error& error);

// Whether bytes that came from another rank are an error, as pack_error() writes it. Others are not read as one, though
// unpack_error() takes any: who sends them is no rank of this build.
bool is_packed_error(std::string_view bytes);

// Any exception as an Error: a failed allocation is kMemory, a thread that can't be started kUnsupported, what else is
// no Error kInternal.
Error as_error(const std::exception_ptr& exception);

}  // namespace ringattn
