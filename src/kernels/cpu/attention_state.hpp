// SPDX-License-Identifier: Apache-2.0
// The CPU kernel's fold state: a row's open group of key tiles, and the groups before it. In memory there are for each
// (row, head), one after the other,
//   flags                 which of the two are there: kHasMerged, kHasCurrent
//   m, l, O[head_dim_v]   of the open group
//   m, l, O[head_dim_v]   of the groups before it, merged
// and the numbers of a part that isn't there are never read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention.hpp"
#include "kernels/cpu/tile_ops.hpp"

namespace ringattn::cpu {

inline constexpr int kHasMerged = 1;
inline constexpr int kHasCurrent = 2;

// A row on its way, or between two tasks. It owns no memory: both O lie elsewhere.
struct AttentionState {
  int flags = 0;
  Partial current;
  Partial merged;
};

inline std::size_t state_floats(const AttentionSpec& spec) {
  return 2 * (static_cast<std::size_t>(spec.head_dim_v) + 2) + 1;
}

// Of the row and head; `State` is float or const float.
template <typename State>
State* state_at(const AttentionSpec& spec, State* state, std::int64_t row, std::int64_t head) {
  return state + static_cast<std::size_t>(row * spec.heads + head) * state_floats(spec);
}

// The row whose state begins at `state`; both O stay there.
AttentionState read_state(const AttentionSpec& spec, float* state);
// Writes the numbers of `row`, and both O where they don't lie in the state already.
void write_state(const AttentionSpec& spec, const AttentionState& row, float* state);

// Merges the open group, if there is one, into the groups before it. What comes next is another group's.
void merge_current(const AttentionSpec& spec, const TileOps& ops, AttentionState& row);
// Closes the row's open group, then merges all of `partial`, which is one group, behind it.
void merge_row(const AttentionSpec& spec, const TileOps& ops, const AttentionState& partial, AttentionState& row);
// Everything that the row has folded. Closes the open group where there are others.
Partial merge_all(const AttentionSpec& spec, const TileOps& ops, AttentionState& row);

// Which NaN an operation on two of them gives is the compiler's choice: every NaN that leaves is the same one.
float one_nan(float x);

// Divides, rounds and writes one row. sink: null or the head's; out: [head_dim_v] of spec.dtype. Returns LSE.
float finish_row(const AttentionSpec& spec, const Partial& row, const float* sink, std::byte* out);

}  // namespace ringattn::cpu
