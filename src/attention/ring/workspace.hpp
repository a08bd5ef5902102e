// SPDX-License-Identifier: Apache-2.0
// Where things lie in the workspace of a run: fold state, two block buffers, and a dense copy of a strided shard.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/ring/plan.hpp"
#include "base/tensor.hpp"
#include "kernels/fold.hpp"

namespace ringattn {

// Dense rows of K and of V: [rows, kv_heads, head_dim] and [rows, kv_heads, head_dim_v].
struct KvRows {
  std::byte* k = nullptr;
  std::byte* v = nullptr;
};

struct WorkspaceLayout {
  std::size_t state = 0;           // byte offsets
  std::size_t buffers[2][2] = {};  // [block parity][k, v]
  std::size_t staged[2] = {};      // [k, v]
  std::size_t bytes = 0;
};

// `staged_rows`: rows of the dense copy, 0 without one.
WorkspaceLayout workspace_layout(const FoldSpec& spec, std::size_t state_bytes, std::int64_t buffer_rows,
                                 std::int64_t staged_rows);

// The two block buffers alone.
WorkspaceLayout block_buffers_layout(const FoldSpec& spec, std::int64_t buffer_rows);

// Bytes of one token's row of K or of V.
std::int64_t k_row_bytes(const FoldSpec& spec);
std::int64_t v_row_bytes(const FoldSpec& spec);

}  // namespace ringattn
