// SPDX-License-Identifier: Apache-2.0
// The CPU kernel's fold state: a row's open group of key tiles, and the groups before it. In memory there are for each
// (row, head), one after the other,
//   parts                 which of the two are there: kHasClosed, kHasOpen
//   m, l, O[head_dim_v]   of the open group
//   m, l, O[head_dim_v]   of the groups before it, merged
// and the numbers of a part that isn't there are never read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/tile_ops.hpp"
#include "kernels/fold.hpp"

namespace ringattn::cpu {

inline constexpr int kHasClosed = 1;
inline constexpr int kHasOpen = 2;

// A row on its way, or between two tasks. It owns no memory: both O lie elsewhere.
struct RowState {
  int parts = 0;
  Partial open;
  Partial closed;
};

inline std::size_t state_floats(const FoldSpec& spec) {
  return 2 * (static_cast<std::size_t>(spec.head_dim_v) + 2) + 1;
}

// Of the row and head; `State` is float or const float.
template <typename State>
State* state_at(const FoldSpec& spec, State* state, std::int64_t row, std::int64_t head) {
  return state + static_cast<std::size_t>(row * spec.heads + head) * state_floats(spec);
}

// The row whose state begins at `state`; both O stay there.
RowState read_state(const FoldSpec& spec, float* state);
// Writes the numbers of `row`, and both O where they don't lie in the state already.
void write_state(const FoldSpec& spec, const RowState& row, float* state);

// Merges the open group, if there is one, into the groups before it. What comes next is another group's.
void close_group(const FoldSpec& spec, const TileOps& ops, RowState& row);
// Closes the row's open group, then merges all of `partial`, which is one group, behind it.
void merge_row(const FoldSpec& spec, const TileOps& ops, const RowState& partial, RowState& row);
// Everything that the row has folded. Closes the open group where there are others.
Partial merge_all(const FoldSpec& spec, const TileOps& ops, RowState& row);

// Which NaN an operation on two of them gives is the compiler's choice: every NaN that leaves is the same one.
float one_nan(float x);

// Divides, rounds and writes one row. sink: null or the head's; out: [head_dim_v] of spec.dtype. Returns LSE.
float finish_row(const FoldSpec& spec, const Partial& row, const float* sink, std::byte* out);

}  // namespace ringattn::cpu
