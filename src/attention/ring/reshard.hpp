// SPDX-License-Identifier: Apache-2.0
// Moves rows from one distribution over the ranks to another, blocking and in host memory. Reshard
// (ops/reshard/reshard.hpp) does it on a stream in any memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/tokens/batch.hpp"
#include "attention/tokens/layout.hpp"
#include "comm/transport.hpp"

namespace ringattn {

// The packed axis in `world` equal runs, one per rank. Results of different layouts are moved to it before a
// comparison.
Layout even_layout(std::span<const std::int64_t> lengths, int world);

// A layout of fewer ranks, extended to `world` ranks by ranks without tokens.
Layout widened(const Layout& layout, const Batch& batch, int world);

// Rows of rank `from` that become rows of rank `to`.
struct RowTransfer {
  int from = 0;  // ranks
  int to = 0;
  std::int64_t from_row = 0;
  std::int64_t to_row = 0;
  std::int64_t rows = 0;
};

// All transfers that rank `rank` sends or receives, ascending by token. Transfers that are adjacent on both sides are
// merged.
std::vector<RowTransfer> row_transfers(const Layout& from, const Layout& to, int rank);

// Collective. Moves this rank's rows, `token_bytes` each, from layout `from` to `target` in layout `to`. Both are
// layouts of the same tokens over this world's ranks, in host memory. Throws kPeer past the deadline.
void reshard(Transport& world, const Layout& from, const Layout& to, const std::byte* rows, std::byte* target,
             std::int64_t token_bytes, const Deadline& deadline);

}  // namespace ringattn
