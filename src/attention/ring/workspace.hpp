// SPDX-License-Identifier: Apache-2.0
// Layout of the workspace of a run: state, two block buffers, and a dense copy of a strided shard.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/ring/row_stream.hpp"

namespace ringattn {

// Byte offsets in the workspace.
struct WorkspaceLayout {
  std::size_t state = 0;
  std::array<std::vector<std::size_t>, 2> buffers;  // [block parity][streams]
  std::vector<std::size_t> staged;                  // [streams]
  std::size_t bytes = 0;
};

// `staged_rows`: numbers of rows of the dense copy, 0 without one.
WorkspaceLayout workspace_layout(std::span<const RowStream> streams, std::size_t state_bytes, RowCounts buffer_rows,
                                 RowCounts staged_rows);

// The layout of only the two block buffers.
WorkspaceLayout block_buffers_layout(std::span<const RowStream> streams, RowCounts buffer_rows);

// The addresses at these offsets from `base`.
StreamRows rows_at(std::byte* base, std::span<const std::size_t> offsets);

}  // namespace ringattn
