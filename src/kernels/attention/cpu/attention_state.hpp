// SPDX-License-Identifier: Apache-2.0
// AttentionState of the CPU kernel: a row's partial of the current KV split, and the merged splits before it. In memory
// each (row, head) has, one after the other,
//   flags                 which of the two are present: kHasMerged, kHasCurrent
//   m, l, O[head_dim_v]   of the current split
//   m, l, O[head_dim_v]   of the merged splits
// Floats of an absent part are never read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/attention.hpp"
#include "kernels/common/cpu/tile_ops.hpp"

namespace ringattn::cpu {

inline constexpr int kHasMerged = 1;
inline constexpr int kHasCurrent = 2;

// A row's state, during or between tasks. Does not own memory: both O are elsewhere.
struct AttentionState {
  int flags = 0;
  Partial current;
  Partial merged;
};

inline std::size_t state_floats(const AttentionSpec& spec) {
  return 2 * (static_cast<std::size_t>(spec.head_dim_v) + 2) + 1;
}

// Address of the state of (row, head). `State` is float or const float.
template <typename State>
State* state_at(const AttentionSpec& spec, State* state, std::int64_t row, std::int64_t head) {
  return state + static_cast<std::size_t>(row * spec.heads + head) * state_floats(spec);
}

// Reads the state at `state`. Both O stay there.
AttentionState read_state(const AttentionSpec& spec, float* state);
// Writes the floats of `row`, and both O unless they are already in the state.
void write_state(const AttentionSpec& spec, const AttentionState& row, float* state);

// Merges the current split, if there is one, into the merged splits. The next tile then begins another split.
void merge_current(const AttentionSpec& spec, const TileOps& ops, AttentionState& row);
// Merges the row's current split, and then all of `partial`, which is one split, after it.
void merge_row(const AttentionSpec& spec, const TileOps& ops, const AttentionState& partial, AttentionState& row);
// The partial of everything that the row has attended to. Merges the current split if there are merged ones.
Partial merge_all(const AttentionSpec& spec, const TileOps& ops, AttentionState& row);

// Replaces any NaN by one canonical NaN. If both operands are NaN, the compiler decides which of them the result is.
float one_nan(float x);

// out ← acc · scale / sum, one rounding to `dtype`, with one canonical NaN. acc: [count], not aligned. Vectorized, and
// the same on every SIMD target. Defined in common/cpu/tile_ops.cpp.
void write_row(const float* acc, int count, float scale, float sum, Dtype dtype, std::byte* out);

// Divides, rounds and writes one row. `sink` is null or the head's sink. out: [head_dim_v] of spec.dtype. Returns LSE.
float finish_row(const AttentionSpec& spec, const Partial& row, const float* sink, std::byte* out);

}  // namespace ringattn::cpu
