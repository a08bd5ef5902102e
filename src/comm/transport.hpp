// SPDX-License-Identifier: Apache-2.0
// Interface of all transports: ranks that exchange spans of memory. A transport knows nothing of tiles or attention.
//
// Order. Both sides describe the transfer of a block as an Exchange. The n-th exchange that a rank posts is matched
// with the n-th of each peer. An exchange has at most one message for each (sender, receiver, round), and both sides
// give its spans the same sizes. A send of round r may read what this rank's receives of rounds < r wrote, so it starts
// after they are done. Within a round all messages may move concurrently, and rounds of different exchanges may
// overlap.
//
// Streams. post() takes effect after all work enqueued on `stream` before it. Work enqueued after wait() runs after the
// exchange has finished. Device transports only enqueue. Host transports move bytes in the background or whenever
// progress() or wait() is called, and wait() returns when they are done.
//
// Failure. No call outlasts its deadline, unless other ranks with heartbeats work meanwhile (comm/timeouts.hpp). A call
// that expires throws Error (kPeer), naming the peers it waited for, or earlier the rank that has fallen silent. Once
// one rank has called abort(), every call of every rank of the same world throws shortly afterwards, with the code
// passed to abort(). A world and the worlds split from it fail together. A wait() that throws has given up every
// exchange in flight, like abandon(). Afterwards the world can only be aborted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/deadline.hpp"
#include "base/error.hpp"
#include "base/memory.hpp"

namespace ringattn {

// The operations of a group of ranks that has no transport yet: rank numbers, a barrier, and a small all-gather. They
// are implemented by MPI, by a store that ranks connect to, or by the caller's functions.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Returns every rank's `bytes` (a few KiB at most, lengths may differ) in rank order. Collective.
  virtual std::vector<std::string> all_gather(std::string_view bytes, const Deadline& deadline) = 0;
  // Collective.
  virtual void barrier(const Deadline& deadline) = 0;
};

struct SendSpan {
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
};

struct ReceiveSpan {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

struct SendMessage {
  int peer = 0;
  int round = 0;
  std::vector<SendSpan> spans;
};

struct ReceiveMessage {
  int peer = 0;
  int round = 0;
  std::vector<ReceiveSpan> spans;
};

// Exchange::announced of an exchange that was not passed to Transport::announce().
inline constexpr std::int64_t kNotAnnounced = -1;

struct Exchange {
  std::string label;                       // names the exchange in error messages, e.g. "block 3 of 12"
  std::vector<SendMessage> sends;          // ascending by round
  std::vector<ReceiveMessage> receives;    // ascending by round
  std::int64_t announced = kNotAnnounced;  // its number from announce()
};

// Identifies a posted exchange until it has been waited for.
using Ticket = std::int64_t;

// How the parts of a block reach all ranks: forwarded from neighbour to neighbour, or sent directly from the owner to
// every rank that needs them.
enum class Route { kChain, kDirect };

class Transport : public Bootstrap {
 public:
  virtual std::string_view name() const = 0;
  virtual MemoryKind memory() const = 0;
  // For device transports: the CUDA index in this process of the device whose memory this rank moves.
  virtual int device() const { return 0; }
  virtual Route route() const = 0;

  // Collective. Tells peers once where the receives of exchanges go that will be posted many times into the same
  // memory. Returns the number of the first exchange, and the others are numbered consecutively. Returns kNotAnnounced
  // if the transport does not use announcements. Sends must have their sizes here, but need no address yet. An
  // announced exchange may be posted any number of times, as long as all ranks post the same one and the memory lives.
  virtual std::int64_t announce(std::span<const Exchange> /*exchanges*/, const Deadline& /*deadline*/) {
    return kNotAnnounced;
  }

  // Spans must stay valid, and the data of sends unchanged, until wait() has returned for the ticket. On devices they
  // must stay so until the stream has passed the wait.
  virtual Ticket post(Exchange exchange, Stream stream) = 0;
  // Each ticket is waited for once, in the order of post(). A device transport only enqueues the wait. The deadline's
  // length then counts from when the device reaches the wait, and progress() throws after that.
  virtual void wait(Ticket ticket, Stream stream, const Deadline& deadline) = 0;
  // Advances the transfers of host transports. Cheap when there is nothing to do.
  virtual void progress() = 0;
  // Returns true if wait(ticket) would return at once. Moves nothing and never blocks.
  virtual bool finished(Ticket ticket) = 0;
  // Gives up every exchange in flight. When it returns, nothing writes to this rank's spans any more. For a rank that
  // fails between post() and wait(), before it frees them. MPI may read send spans until the process ends. Buffers then
  // keep their memory (base/memory.hpp), and the caller must keep other send memory.
  virtual void abandon() noexcept = 0;

  // A transport of host memory with the same ranks: the control transport of a device transport, otherwise this one.
  // Must not be used while exchanges are in flight here.
  virtual Transport& host() { return *this; }

  // A new world of ranks 0 … size − 1 of this one; nullptr on the other ranks. Collective over the whole world.
  virtual std::unique_ptr<Transport> split_world(int size, const Deadline& deadline) = 0;

  // Aborts the world. Called by a rank that failed outside a collective phase, with the error to report. Returns true
  // if this rank prints it. Exactly one of the calling ranks prints, unless they can't agree on it in time.
  virtual bool abort(const Error& error) = 0;
};

// An error that every rank of the world throws at the same point, so no rank is left waiting.
class AgreedError : public Error {
 public:
  explicit AgreedError(Error error) : Error(std::move(error)) {}
};

// If any rank passes an error, every rank throws the error of the lowest such rank as an AgreedError. It has that
// rank's location and the same code and message on all ranks. The message also names the location, unless all ranks
// fail with the same message. Collective. For phases that all ranks run and any rank may fail (open a file, allocate
// memory).
void agree(Bootstrap& world, const Error* error, const Deadline& deadline);

}  // namespace ringattn
