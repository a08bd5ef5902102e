// SPDX-License-Identifier: Apache-2.0
// The CPU kernel's fold state in memory: for each (row, head) the numbers m, l, O[head_dim_v], one after the other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/fold.hpp"

namespace ringattn::cpu {

inline std::size_t state_floats(const FoldSpec& spec) { return static_cast<std::size_t>(spec.head_dim_v) + 2; }

// Of the row and head; `State` is float or const float.
template <typename State>
State* state_at(const FoldSpec& spec, State* state, std::int64_t row, std::int64_t head) {
  return state + static_cast<std::size_t>(row * spec.heads + head) * state_floats(spec);
}

// Divides, rounds and writes one row. o: [head_dim_v], not normalised; sink: null or the head's; out: [head_dim_v] of
// spec.dtype. Returns LSE.
float finish_row(const FoldSpec& spec, float m, float l, const float* o, const float* sink, std::byte* out);

}  // namespace ringattn::cpu
