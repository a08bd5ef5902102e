// SPDX-License-Identifier: Apache-2.0
// Ranks and bytes. A transport moves spans of memory between ranks; it knows nothing of tiles or attention.
//
// Order. Both sides describe a block's movement as an Exchange; the n-th exchange that a rank posts meets the n-th of
// its peers. In an exchange there is at most one message for each (sender, receiver, round), and its spans have the
// same sizes on both sides. A send of round r may read what this rank's receives of rounds < r wrote: it starts after
// them. Within a round everything may move at once, and rounds of different exchanges may overlap.
//
// Streams. post() takes effect after everything enqueued on `stream` before it; what is enqueued after wait() runs
// after the exchange has finished. Device transports only enqueue; host transports move bytes in the background, or
// whenever progress() or wait() is called, and wait() returns when they are done.
//
// Failure. No call outlasts its deadline, unless ranks that give signs of life work meanwhile (comm/timeouts.hpp): it
// throws Error (kPeer) that names the peers waited for, or before that the rank that has fallen silent. Once one rank
// has called abort(), every call of every rank of the same world throws within moments, with the code that abort()
// gave; a world and those split from it end together. A wait() that throws has given up every exchange in flight, as
// abandon() does; afterwards the world can only be aborted.
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

// What every world has before it has a transport: ranks, a barrier, a small all-gather. MPI gives it, a store that
// ranks connect to, or functions of the caller.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Every rank's `bytes` (a few KiB at most; lengths may differ), in order of rank. Collective.
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

// An exchange that Transport::announce() has not heard of.
inline constexpr std::int64_t kNotAnnounced = -1;

struct Exchange {
  std::string label;                       // for messages about failures, e.g. "block 3 of 12"
  std::vector<SendMessage> sends;          // ascending by round
  std::vector<ReceiveMessage> receives;    // ascending by round
  std::int64_t announced = kNotAnnounced;  // its number of announce()
};

// Names a posted exchange until it has been waited for.
using Ticket = std::int64_t;

// How a block's parts travel: handed on from neighbour to neighbour, or straight from the owner to everyone who needs
// them.
enum class Route { kChain, kDirect };

class Transport : public Bootstrap {
 public:
  virtual std::string_view name() const = 0;
  virtual MemoryKind memory() const = 0;
  // Of device transports: the device whose memory this rank moves, by its index in this process.
  virtual int device() const { return 0; }
  virtual Route route() const = 0;

  // Collective. Tells peers once what exchanges receive that will be posted many times, each time into the same memory.
  // Returns the number of the first of them, the others follow it; or kNotAnnounced where this transport has nothing to
  // tell. What an exchange sends has its sizes here, and need not have an address yet. An announced exchange may be
  // posted any number of times, as long as all ranks post the same one and the memory lives.
  virtual std::int64_t announce(std::span<const Exchange> /*exchanges*/, const Deadline& /*deadline*/) {
    return kNotAnnounced;
  }

  // Spans stay valid, and the sends' data unchanged, until wait() has returned for the ticket; on devices until the
  // stream has passed it.
  virtual Ticket post(Exchange exchange, Stream stream) = 0;
  // Each ticket is waited for once, in the order of post(). A device transport only enqueues the wait; the deadline's
  // length then counts from when the device reaches it, and progress() throws past it.
  virtual void wait(Ticket ticket, Stream stream, const Deadline& deadline) = 0;
  // Moves host transports on; cheap when there is nothing to do.
  virtual void progress() = 0;
  // Whether wait(ticket) would return at once. Moves nothing, never blocks.
  virtual bool finished(Ticket ticket) = 0;
  // Gives up every exchange in flight: when it returns, nothing is written to this rank's spans any more. For a rank
  // that fails between post() and wait(), before it frees them. Over MPI what was to be sent may still be read until
  // the process ends; Buffers then keep their memory (base/memory.hpp), and other memory that is sent has to stay, too.
  virtual void abandon() noexcept = 0;

  // The same ranks as a transport of host memory: of device transports the one beside them, else itself. Not while
  // exchanges are in flight here.
  virtual Transport& host() { return *this; }

  // Ranks 0 … size − 1 of this world as a world of their own, nullptr on the others. Collective over the whole world.
  virtual std::unique_ptr<Transport> split_world(int size, const Deadline& deadline) = 0;

  // Ends the world. Called by a rank that failed alone, with the failure it wants to be known; returns whether this
  // rank is the one that prints it (exactly one of those that call is, unless it can't be agreed on in time).
  virtual bool abort(const Error& error) = 0;
};

// An error that every rank of the world throws at the same point, so nobody is left waiting.
class AgreedError : public Error {
 public:
  explicit AgreedError(Error error) : Error(std::move(error)) {}
};

// If any rank passes an error, every rank throws that of the lowest such rank as an AgreedError with its place and the
// same code and message. The message names the place, too, unless all ranks fail alike. Collective: for phases that all
// ranks run, in which any of them may fail alone (open a file, allocate memory).
void agree(Bootstrap& world, const Error* error, const Deadline& deadline);

}  // namespace ringattn
