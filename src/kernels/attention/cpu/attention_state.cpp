// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/cpu/attention_state.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ringattn::cpu {

namespace {

// Merges `partial` into the merged splits.
void merge_partial(const AttentionSpec& spec, const TileOps& ops, const Partial& partial, AttentionState& row) {
  if ((row.flags & kHasMerged) != 0) {
    ops.merge(spec.head_dim_v, partial, row.merged);
    return;
  }
  row.merged.offset = partial.offset;
  row.merged.sum = partial.sum;
  std::copy_n(partial.acc, spec.head_dim_v, row.merged.acc);
  row.flags |= kHasMerged;
}

void write_state_partial(const AttentionSpec& spec, const Partial& partial, float* at) {
  at[0] = partial.offset;
  at[1] = partial.sum;
  if (partial.acc != at + 2) std::copy_n(partial.acc, spec.head_dim_v, at + 2);
}

}  // namespace

AttentionState read_state(const AttentionSpec& spec, float* state) {
  float* const current = state + 1;
  float* const merged = current + 2 + spec.head_dim_v;
  return {static_cast<int>(state[0]), {current[0], current[1], current + 2}, {merged[0], merged[1], merged + 2}};
}

void write_state(const AttentionSpec& spec, const AttentionState& row, float* state) {
  state[0] = static_cast<float>(row.flags);
  if ((row.flags & kHasCurrent) != 0) write_state_partial(spec, row.current, state + 1);
  if ((row.flags & kHasMerged) != 0) write_state_partial(spec, row.merged, state + 3 + spec.head_dim_v);
}

void merge_current(const AttentionSpec& spec, const TileOps& ops, AttentionState& row) {
  if ((row.flags & kHasCurrent) == 0) return;
  merge_partial(spec, ops, row.current, row);
  row.flags &= ~kHasCurrent;
}

void merge_row(const AttentionSpec& spec, const TileOps& ops, const AttentionState& partial, AttentionState& row) {
  merge_current(spec, ops, row);
  // A completed split may already be merged or not.
  if ((partial.flags & kHasMerged) != 0) merge_partial(spec, ops, partial.merged, row);
  if ((partial.flags & kHasCurrent) != 0) merge_partial(spec, ops, partial.current, row);
}

Partial merge_all(const AttentionSpec& spec, const TileOps& ops, AttentionState& row) {
  if ((row.flags & kHasMerged) == 0) return row.current;  // the only split, or the identity
  merge_current(spec, ops, row);
  return row.merged;
}

float one_nan(float x) { return std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : x; }

float finish_row(const AttentionSpec& spec, const Partial& row, const float* sink, std::byte* out) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double softmax_offset = row.offset;
  double sum = row.sum;
  float scale = 1.0F;
  if (sink != nullptr) {
    // The sink is one more score, without a value.
    const double logit = *sink;
    softmax_offset = logit > softmax_offset || std::isnan(logit) ? logit : softmax_offset;
    const double finite = softmax_offset == -kInfinity ? 0.0 : softmax_offset;
    const double weight = std::exp(static_cast<double>(row.offset) - finite);
    sum = sum * weight + std::exp(logit - finite);
    scale = static_cast<float>(weight);
  }
  // If no key was seen, O is 0, and log 0 is −∞.
  const float divisor = sum == 0.0 ? 1.0F : static_cast<float>(sum);
  write_row(row.acc, spec.head_dim_v, scale, divisor, spec.dtype, out);
  return one_nan(static_cast<float>(softmax_offset + std::log(sum)));
}

}  // namespace ringattn::cpu
