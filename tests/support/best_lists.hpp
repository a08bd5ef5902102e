// SPDX-License-Identifier: Apache-2.0
// Lists of the best blocks of inputs, by any backend.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/cpu_fold.hpp"
#include "kernels/top_k_lists.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/fold_inputs.hpp"

namespace ringattn::testing {

// Of inputs whose spec has lists. Rows lie in the backend's memory, and come in pieces of at most so many.
inline TileLists best_lists(const FoldInputs& inputs, int count, Backend& backend,
                            std::int64_t piece = std::int64_t{1} << 40) {
  const FoldSpec& spec = inputs.spec;
  DeviceArray q(backend, std::max<std::size_t>(1, inputs.q.size()));
  DeviceArray k(backend, std::max<std::size_t>(1, inputs.k.size()));
  q.write(inputs.q);
  k.write(inputs.k);
  const auto view = [&](const DeviceArray& array, std::int64_t tokens, int heads) {
    return dense_view(static_cast<const void*>(array.data()), spec.dtype, tokens, heads, spec.head_dim);
  };
  const RowSource whole = packed_rows(inputs.listed_sequences(), view(q, inputs.q_tokens(), spec.heads),
                                      view(k, inputs.k_tokens(), spec.kv_heads));
  const RowSource rows = [&](SyntheticTensor tensor, std::size_t sequence, std::int64_t first, std::int64_t most) {
    return whole(tensor, sequence, first, std::min(most, piece));
  };
  return top_k_lists(spec, inputs.listed_sequences(), count, rows, backend, backend.stream());
}

// By the host.
inline TileLists best_lists(const FoldInputs& inputs, int count, std::int64_t piece = std::int64_t{1} << 40) {
  return best_lists(inputs, count, *cpu::make_cpu_backend({1, 0}), piece);
}

}  // namespace ringattn::testing
