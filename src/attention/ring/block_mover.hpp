// SPDX-License-Identifier: Apache-2.0
// Turns a block's part messages into spans of memory, posts and awaits them, and checks what arrived.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/ring/plan.hpp"
#include "attention/ring/row_stream.hpp"
#include "comm/transport.hpp"
#include "kernels/backend.hpp"

namespace ringattn {

class BlockMover {
 public:
  // What it refers to outlives the object.
  BlockMover(const Plan& plan, std::span<const RowStream> streams, Transport& transport, Backend& backend,
             bool checksum);

  // Collective. Tells the transport where the blocks of all runs will land; bind() then always names these buffers.
  void announce(std::array<StreamRows, 2> buffers, const Deadline& deadline);

  // The memory of the next run: the rank's own rows, dense, and the two block buffers, of which block b uses the one
  // of its parity. Nothing is read or written yet.
  void bind(StreamRows shard, std::array<StreamRows, 2> buffers);

  // Hands the block's transfers to the transport.
  void post(std::int64_t block, Stream stream);
  // Returns (or on devices: lets `stream` go on) when the block is here, its straddling tiles assembled. Throws kPeer
  // past the deadline or when a part arrived damaged.
  void wait(std::int64_t block, Stream stream, const Deadline& deadline);

 private:
  Exchange exchange_of(std::int64_t block);
  // Where a part's rows of a stream lie (nullptr for the rank's own before bind()), and their bytes.
  std::byte* rows_of(const MessagePart& part, std::int64_t block, std::size_t stream) const;
  std::size_t bytes_of(const MessagePart& part, std::size_t stream) const;
  std::uint64_t checksum_of(const MessagePart& part, std::int64_t block) const;
  void verify(std::int64_t block) const;

  const Plan& plan_;
  std::span<const RowStream> streams_;
  Transport& transport_;
  Backend& backend_;
  const bool checksum_;
  StreamRows shard_;
  std::array<StreamRows, 2> buffers_;
  std::int64_t announced_ = kNotAnnounced;  // the first block's exchange
  std::array<Ticket, 2> tickets_{};
  std::array<std::vector<std::uint64_t>, 2> checksums_;  // of the block's parts, by index
};

}  // namespace ringattn
