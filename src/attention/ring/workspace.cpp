// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/workspace.hpp"

namespace ringattn {

std::int64_t k_row_bytes(const FoldSpec& spec) {
  return std::int64_t{spec.kv_heads} * spec.head_dim * static_cast<std::int64_t>(size_of(spec.dtype));
}

std::int64_t v_row_bytes(const FoldSpec& spec) {
  return std::int64_t{spec.kv_heads} * spec.head_dim_v * static_cast<std::int64_t>(size_of(spec.dtype));
}

WorkspaceLayout workspace_layout(const FoldSpec& spec, std::size_t state_bytes, std::int64_t buffer_rows,
                                 std::int64_t staged_rows) {
  constexpr std::size_t kAlignment = 256;
  WorkspaceLayout layout;
  const auto place = [&layout](std::size_t bytes) {
    const std::size_t offset = layout.bytes;
    layout.bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  };
  const auto bytes_of = [](std::int64_t rows, std::int64_t row_bytes) {
    return static_cast<std::size_t>(rows * row_bytes);
  };
  layout.state = place(state_bytes);
  for (auto& buffer : layout.buffers) {
    buffer[0] = place(bytes_of(buffer_rows, k_row_bytes(spec)));
    buffer[1] = place(bytes_of(buffer_rows, v_row_bytes(spec)));
  }
  layout.staged[0] = place(bytes_of(staged_rows, k_row_bytes(spec)));
  layout.staged[1] = place(bytes_of(staged_rows, v_row_bytes(spec)));
  return layout;
}

WorkspaceLayout block_buffers_layout(const FoldSpec& spec, std::int64_t buffer_rows) {
  return workspace_layout(spec, 0, buffer_rows, 0);
}

}  // namespace ringattn
