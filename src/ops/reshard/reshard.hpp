// SPDX-License-Identifier: Apache-2.0
// Moves rows from one distribution over the ranks to another, on a stream: between attention, whose layout is striped,
// and an SSM, whose ranks have adjacent tokens, or between a caller's distribution and either.
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
// Rows are copied as bytes, so a stack of layers has the same bits on any number of ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention/tokens/layout.hpp"
#include "base/memory.hpp"
#include "comm/transport.hpp"
#include "kernels/common/backend.hpp"

namespace ringattn {

class JsonWriter;

// The queries' layout of attention over all tokens of these sequences.
Layout attention_layout(const std::vector<std::int64_t>& lengths, int world, const LayoutRequest& request);

// Bytes that each rank receives from others when rows of `token_bytes` are moved from one layout to another: [ranks].
// No ranks run here.
std::vector<std::int64_t> reshard_bytes(const Layout& from, const Layout& to, std::int64_t token_bytes);

// For plans of layers with states: bytes that each rank receives when rows come from attention's zigzag layout, and
// when they return to it.
struct AttentionReshard {
  std::vector<std::int64_t> before;  // [ranks], before the layer
  std::vector<std::int64_t> after;   // [ranks], after the layer

  std::string text() const;            // the maximum of each
  void write(JsonWriter& json) const;  // the member "reshard" of a plan's row
};
AttentionReshard attention_reshard(const std::vector<std::int64_t>& lengths, const Layout& layer,
                                   std::int64_t token_bytes);

class Reshard {
 public:
  // Collective. Compares the layouts with the other ranks. Allocates receive buffers, and send buffers for rows that
  // are not contiguous on this rank, together at most the size of the rows. `from` and `to` are layouts of the same
  // tokens over the transport's ranks. The rows lie in the memory of `backend`. Transport and backend must outlive the
  // object. Throws Error: kUsage (other tokens or ranks, no bytes), kUnsupported (ranks differ, or the transport moves
  // another kind of memory), kMemory, kPeer.
  Reshard(const Layout& from, const Layout& to, std::int64_t token_bytes, Transport& transport, Backend& backend,
          double timeout_seconds = 60.0);
  // Abandons work that was not waited for. With several ranks the transport is then unusable.
  ~Reshard();
  Reshard(Reshard&&) noexcept;
  Reshard& operator=(Reshard&&) = delete;

  // Bytes that this rank receives from others per enqueue().
  std::int64_t bytes_received() const;
  std::size_t memory_bytes() const;  // allocated by the object

  // Copies `rows`, this rank's rows of `from`, to `target`, its rows of `to`. Both are dense, [tokens, token_bytes],
  // and must not overlap. Not collective, no allocation, no wait for the device: every rank enqueues the same calls in
  // the same order, on streams that are ordered among themselves. With host memory the rows have moved on return.
  // kUnsupported on a stream that is being captured, with several ranks.
  void enqueue(const void* rows, void* target, Stream stream = {});
  // Returns when all enqueued work is done. Throws kPeer for a deadline or a dead peer.
  void wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
