// SPDX-License-Identifier: Apache-2.0
// Block masks of the best blocks of inputs, chosen by any backend.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/attention/top_k_selection.hpp"
#include "kernels/common/platform.hpp"
#include "tests/support/attention_inputs.hpp"
#include "tests/support/device_array.hpp"

namespace ringattn::testing {

// Chooses the block mask of inputs whose spec has one. Rows are in the backend's memory, and are passed in pieces of at
// most `piece` tokens.
inline BlockMask top_k_block_mask(const AttentionInputs& inputs, int count, Backend& backend,
                                  std::int64_t piece = std::int64_t{1} << 40) {
  const AttentionSpec& spec = inputs.spec;
  DeviceArray q(backend, std::max<std::size_t>(1, inputs.q.size()));
  DeviceArray k(backend, std::max<std::size_t>(1, inputs.k.size()));
  q.write(inputs.q);
  k.write(inputs.k);
  const auto view = [&](const DeviceArray& array, std::int64_t tokens, int heads) {
    return dense_view(static_cast<const void*>(array.data()), spec.dtype, tokens, heads, spec.head_dim);
  };
  const RowSource whole = packed_rows(inputs.masked_sequences(), view(q, inputs.q_tokens(), spec.heads),
                                      view(k, inputs.k_tokens(), spec.kv_heads));
  const RowSource rows = [&](SyntheticTensor tensor, std::size_t sequence, std::int64_t first, std::int64_t most) {
    return whole(tensor, sequence, first, std::min(most, piece));
  };
  return top_k_selection(spec, inputs.masked_sequences(), count, rows, backend, backend.stream());
}

// By the host.
inline BlockMask top_k_block_mask(const AttentionInputs& inputs, int count,
                                  std::int64_t piece = std::int64_t{1} << 40) {
  return top_k_block_mask(inputs, count, *cpu::make_cpu_backend({1, 0}), piece);
}

}  // namespace ringattn::testing
