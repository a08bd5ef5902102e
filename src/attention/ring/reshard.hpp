// SPDX-License-Identifier: Apache-2.0
// Moves rows from one distribution over the ranks to another: at once, in host memory. On a stream, in any memory, is
// Reshard (attention/reshard.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/tokens/batch.hpp"
#include "attention/tokens/layout.hpp"
#include "comm/transport.hpp"

namespace ringattn {

// The tokens of sequences in P equal pieces of the packed axis, a piece a rank: what results of different layouts are
// brought to before they are compared.
Layout even_layout(std::span<const std::int64_t> lengths, int world);

// A layout of fewer ranks as one of `world` ranks, the others without tokens.
Layout widened(const Layout& layout, const Batch& batch, int world);

// Rows of one rank that become rows of one rank.
struct RowTransfer {
  int from = 0;  // ranks
  int to = 0;
  std::int64_t from_row = 0;
  std::int64_t to_row = 0;
  std::int64_t rows = 0;
};

// What rank `rank` has a part in, on either side, ascending by token; neighbours on both sides are one.
std::vector<RowTransfer> row_transfers(const Layout& from, const Layout& to, int rank);

// Moves this rank's rows, `token_bytes` each and laid out as `from`, to `target`, laid out as `to`; both are layouts of
// this world's ranks, of the same tokens, in host memory. Collective. Throws kPeer past the deadline.
void reshard(Transport& world, const Layout& from, const Layout& to, const std::byte* rows, std::byte* target,
             std::int64_t token_bytes, const Deadline& deadline);

}  // namespace ringattn
