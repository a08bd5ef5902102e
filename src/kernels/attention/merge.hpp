// SPDX-License-Identifier: Apache-2.0
// The merge step, shared by all kernels: merges the partial of a KV split into the merged splits before it.
//
// The key tiles of a sequence form KV splits of kTilesPerKvSplit tiles, counted from the sequence's first tile. A split
// starts from the identity and ends as a partial (r, l, A): softmax offset r, sum l = Σ exp(x − r) and accumulator A =
// Σ exp(x − r) · v over the scores x of its keys. A row's result is the left fold over its partials in ascending order:
//  (R, L, B) ← (r, l, A) of the first split. For each further split:
//  if r exceeds R by more than log 2^kMergeRescaleThreshold:  s = exp(R − r),  L ← L · s,  B ← B · s,  R ← r
//  f = exp(r − R),  L ← L + l · f,  B ← B + A · f
// So a row's bits follow from the partials alone, whichever processor computes a split. A split in which the row sees
// no key is merged like any other: r is −∞, l is 0, and it adds 0.
#pragma once

#include <cmath>

#include "base/host_device.hpp"

namespace ringattn {

// Key tiles per KV split: split g starts at tile g · kTilesPerKvSplit. (DecodeKernel::tiles_per_kv_split() may be
// smaller.) Tensor cores truncate when they accumulate, so the length of their sums is bounded
// (bench/notes/attention-experiments.md has the errors).
inline constexpr int kTilesPerKvSplit = 64;

// Rescale threshold as a log2: partial sums may grow by 2^16 relative to the offset before it is raised. Each rescale
// multiplies a row's whole accumulator, so rescales should be rare. At this value no sum overflows.
inline constexpr float kMergeRescaleThreshold = 16.0F;

// log₂ e: e^x = 2^(x · kLog2E). Offsets that are natural logarithms use it as scale_log2.
inline constexpr float kLog2E = 1.44269504F;

// Factors of one merge step, and the merged offset and sum after it.
struct MergeStep {
  float softmax_offset;  // R after the step
  float sum;             // L after the step
  bool rescales;         // R was raised: multiply B by state_scale first
  float state_scale;     // s, or 1 if not rescaled
  float partial_scale;   // f
};

// Merges the partial (r, l) into (R, L). `scale_log2` converts a difference of offsets to a log2. `exp2` is the
// kernel's own 2^x, called with arguments of at most kMergeRescaleThreshold.
RINGATTN_ANY_CALLEE
template <class Exp2>
RINGATTN_HOST_DEVICE inline MergeStep merge_step(float R, float L, float r, float l, float scale_log2, Exp2 exp2) {
  MergeStep step;
  step.rescales =
      (r - R) * scale_log2 > kMergeRescaleThreshold;  // true for R = −∞; −∞ − −∞ and ∞ − ∞ are NaN, so false
  step.softmax_offset = step.rescales ? r : R;
  const float finite =
      step.softmax_offset == -INFINITY ? 0.0F : step.softmax_offset;  // no key seen yet: exp(−∞ − 0) = 0
  step.state_scale = step.rescales ? exp2((R - finite) * scale_log2) : 1.0F;
  step.partial_scale = exp2((r - finite) * scale_log2);
  step.sum = fmaf(l, step.partial_scale, step.rescales ? L * step.state_scale : L);
  return step;
}

}  // namespace ringattn
