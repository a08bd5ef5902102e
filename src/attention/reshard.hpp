// SPDX-License-Identifier: Apache-2.0
// Rows on their way from one distribution over the ranks to another, on a stream: what lies between attention, whose
// layout is striped, and a scan, whose ranks have neighbouring tokens; or between a caller's own distribution and
// either.
//
//   Attention attention(…);
//   Ssm scan(…);
//   Reshard there(attention.layout().queries, scan.layout(), token_bytes, transport, scan.backend());
//   Reshard back(scan.layout(), attention.layout().queries, token_bytes, transport, scan.backend());
//   attention.enqueue(…, stream);
//   there.enqueue(out, x, stream);
//   scan.enqueue(…, stream);
//   back.enqueue(y, q, stream);
//
// Rows are bytes: nothing of them changes, so a stack of layers has the same bits on any number of ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "attention/tokens/layout.hpp"
#include "base/memory.hpp"
#include "comm/transport.hpp"
#include "kernels/backend.hpp"

namespace ringattn {

class Reshard {
 public:
  // Prepares. Collective. Agrees with the other ranks on what moves, and allocates what arrives from them, and what
  // goes to them where it isn't one stretch of this rank's rows; so up to as much again as the rows. `from` and `to`
  // are layouts of the same tokens over the transport's ranks, and `backend` is whose memory the rows lie in. Throws
  // Error: kUsage (other tokens or ranks, no bytes), kUnsupported (unlike ranks; a transport of another kind of
  // memory), kMemory, kPeer. Transport and backend outlive the object.
  Reshard(const Layout& from, const Layout& to, std::int64_t token_bytes, Transport& transport, Backend& backend,
          double timeout_seconds = 60.0);
  // Gives up what was not waited for; with several ranks that ends the use of the transport.
  ~Reshard();
  Reshard(Reshard&&) noexcept;
  Reshard& operator=(Reshard&&) = delete;

  // Of this rank.
  std::int64_t bytes_received() const;
  std::size_t memory_bytes() const;  // that the object allocated

  // `rows` are this rank's rows of `from`, dense, and become rows of `target`, those of `to`; they don't overlap. No
  // collective, no allocation, no wait for the device: every rank enqueues the same ones in the same order, on streams
  // that follow each other. A host's rows have moved when this returns. kUnsupported on a stream that is being
  // captured, with several ranks.
  void enqueue(const void* rows, void* target, Stream stream = {});
  // Returns when the device has passed all that was enqueued; at once if there is nothing. Throws what it failed with:
  // kPeer for a deadline or a dead peer.
  void wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
