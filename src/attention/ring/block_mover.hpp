// SPDX-License-Identifier: Apache-2.0
// Turns a block's part messages into spans of memory, posts and awaits them, and checks what arrived.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "attention/ring/plan.hpp"
#include "attention/ring/workspace.hpp"
#include "comm/transport.hpp"
#include "kernels/fold.hpp"

namespace ringattn {

class BlockMover {
 public:
  struct Memory {
    KvRows shard;                   // the rank's own K and V, dense
    std::array<KvRows, 2> buffers;  // block b uses buffers[b % 2]
  };

  BlockMover(const Plan& plan, const FoldSpec& spec, Transport& transport, Backend& backend, const Memory& memory,
             bool checksum);
  // Unless settled: gives up what is still in flight, so that nothing is written to memory that a failed run is about
  // to free, and no device waits for a peer for ever.
  ~BlockMover();
  BlockMover(const BlockMover&) = delete;
  BlockMover& operator=(const BlockMover&) = delete;

  // Hands the block's transfers to the transport.
  void post(std::int64_t block, Stream stream);
  // Returns (or on devices: lets `stream` go on) when the block is here, its straddling tiles assembled. Throws kPeer
  // past the deadline or when a part arrived damaged.
  void wait(std::int64_t block, Stream stream, const Deadline& deadline);
  // Called when every block has been waited for and folded, on devices too.
  void settle() { settled_ = true; }
  // The block buffer as a source of the tile map.
  KeySource buffer_source(std::int64_t block) const;

 private:
  KvRows rows_of(const Part& part, std::int64_t block) const;
  void verify(std::int64_t block) const;

  const Plan& plan_;
  const FoldSpec& spec_;
  Transport& transport_;
  Backend& backend_;
  Memory memory_;
  bool checksum_;
  std::array<Ticket, 2> tickets_{};
  bool settled_ = false;
  std::array<std::vector<std::uint64_t>, 2> checksums_;  // of the block's parts, by index
};

}  // namespace ringattn
