// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/workspace.hpp"

#include "base/aligned.hpp"

namespace ringattn {

WorkspaceLayout workspace_layout(std::span<const RowStream> streams, std::size_t state_bytes, RowCounts buffer_rows,
                                 RowCounts staged_rows) {
  WorkspaceLayout layout;
  const auto place = [&layout](std::size_t bytes) {
    const std::size_t offset = layout.bytes;
    layout.bytes += aligned(bytes);
    return offset;
  };
  const auto place_rows = [&](const RowCounts& rows) {
    std::vector<std::size_t> offsets;
    offsets.reserve(streams.size());
    for (const RowStream& stream : streams) {
      offsets.push_back(place(static_cast<std::size_t>(rows.of(stream) * stream.token_bytes)));
    }
    return offsets;
  };
  layout.state = place(state_bytes);
  for (std::vector<std::size_t>& buffer : layout.buffers) buffer = place_rows(buffer_rows);
  layout.staged = place_rows(staged_rows);
  return layout;
}

WorkspaceLayout block_buffers_layout(std::span<const RowStream> streams, RowCounts buffer_rows) {
  return workspace_layout(streams, 0, buffer_rows, {});
}

StreamRows rows_at(std::byte* base, std::span<const std::size_t> offsets) {
  StreamRows rows;
  rows.reserve(offsets.size());
  for (const std::size_t offset : offsets) rows.push_back(base + offset);
  return rows;
}

}  // namespace ringattn
