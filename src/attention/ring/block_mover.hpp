// SPDX-License-Identifier: Apache-2.0
// Turns a block's message parts into byte spans, posts their exchange to the transport, waits for it, and verifies
// checksums. Called by the overlap loop (engine.hpp).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/ring/plan.hpp"
#include "attention/ring/row_stream.hpp"
#include "comm/transport.hpp"
#include "kernels/common/backend.hpp"

namespace ringattn {

class BlockMover {
 public:
  // All arguments outlive the object.
  BlockMover(const Plan& plan, std::span<const RowStream> streams, Transport& transport, Backend& backend,
             bool checksum);

  // Collective. Announces the block buffers of all runs to the transport. bind() must then always name these buffers.
  void announce(std::array<StreamRows, 2> buffers, const Deadline& deadline);

  // Memory of the next run: the rank's own rows, dense, and the two block buffers. Block b uses buffers[b % 2]. Nothing
  // is read or written yet.
  void bind(StreamRows shard, std::array<StreamRows, 2> buffers);

  // Posts the exchange of the block.
  void post(std::int64_t block, Stream stream);
  // Returns (on devices: orders `stream`) after the block has arrived and its scattered tiles are assembled. Throws
  // kPeer past the deadline, or if a checksum is wrong.
  void wait(std::int64_t block, Stream stream, const Deadline& deadline);

 private:
  // Rows of keys, or of queries if they are sent, too.
  struct Direction {
    const Plan& plan;
    std::vector<std::size_t> streams;                     // indices into streams_
    std::array<std::vector<std::uint64_t>, 2> checksums;  // [parts of the block] for each block parity

    const BlockPlan& block(std::int64_t index) const { return plan.blocks[static_cast<std::size_t>(index)]; }
  };

  Exchange exchange_of(std::int64_t block);
  void add_direction(Direction& direction, std::int64_t block, Exchange& exchange);
  // Address of a part's rows of a stream (nullptr for own rows before bind()), and their bytes.
  std::byte* rows_of(const MessagePart& part, std::int64_t block, std::size_t stream) const;
  std::size_t bytes_of(const MessagePart& part, std::size_t stream) const;
  std::uint64_t checksum_of(const Direction& direction, const MessagePart& part, std::int64_t block) const;
  void verify(const Direction& direction, std::int64_t block) const;

  const Plan& plan_;
  std::span<const RowStream> streams_;
  std::vector<Direction> directions_;
  Transport& transport_;
  Backend& backend_;
  const bool checksum_;
  StreamRows shard_;
  std::array<StreamRows, 2> buffers_;
  std::int64_t announced_ = kNotAnnounced;  // the first block's exchange
  std::array<Ticket, 2> tickets_{};
};

}  // namespace ringattn
