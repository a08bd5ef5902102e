// SPDX-License-Identifier: Apache-2.0
// The merge step, written once for every kernel: how a group's partial joins those of the groups before it.
//
// The key tiles of a sequence form groups of kTilesPerKvSplit at fixed tile numbers. A group is folded from the
// identity and leaves a partial (r, l, A): its softmax_offset r, l = Σ exp(x − r) and A = Σ exp(x − r) · v over the
// scores x of its keys. A row's result is the left fold over its groups' partials in ascending order:
//   (R, L, B) ← (r, l, A) of the first group; then, for each further group,
//   where r exceeds R by more than 2^kMergeRescaleThreshold:  s = exp(R − r),  L ← L · s,  B ← B · s,  R ← r
//   f = exp(r − R),  L ← L + l · f,  B ← B + A · f
// So it does not matter who folds a group, nor where: the row's bits follow from the partials alone. A row folds a
// group of which it sees no key like any other: r is −∞, l is 0, and what it adds is 0.
#pragma once

#include <cmath>

#include "base/host_device.hpp"

namespace ringattn {

// Key tiles of a group (DecodeKernel::tiles_per_kv_split() may be fewer): group g holds tiles from g · kTilesPerKvSplit
// on. Tensor cores truncate when they add, so no longer sum is theirs (bench/notes/attention-experiments.md has the
// errors).
inline constexpr int kTilesPerKvSplit = 64;

// In powers of two: partial sums may grow by 2^16 over the first group's before the softmax_offset rescales. The
// softmax_offset rescales seldom, as each move multiplies a row's whole output, and nothing overflows.
inline constexpr float kMergeRescaleThreshold = 16.0F;

// log₂ e: e^x is 2^(x · kLog2E), and references that are natural logarithms have this scale_log2.
inline constexpr float kLog2E = 1.44269504F;

// What a row's merge step multiplies by, and what it leaves.
struct MergeStep {
  float softmax_offset;  // R afterwards
  float sum;             // L afterwards
  bool rescales;         // R has moved: B ← B · state_scale first
  float state_scale;     // s, or 1
  float partial_scale;   // f
};

// Merges the partial (r, l) into (R, L). `scale_log2` times a difference of references is its logarithm to base 2;
// `exp2` is the kernel's own 2^x of numbers that are not greater than kMergeRescaleThreshold.
RINGATTN_ANY_CALLEE
template <class Exp2>
RINGATTN_HOST_DEVICE inline MergeStep merge_step(float R, float L, float r, float l, float scale_log2, Exp2 exp2) {
  MergeStep step;
  step.rescales =
      (r - R) * scale_log2 > kMergeRescaleThreshold;  // from −∞ too; −∞ − −∞ and ∞ − ∞ are NaN, which is not greater
  step.softmax_offset = step.rescales ? r : R;
  const float finite =
      step.softmax_offset == -INFINITY ? 0.0F : step.softmax_offset;  // nothing seen yet: exp(−∞ − 0) = 0
  step.state_scale = step.rescales ? exp2((R - finite) * scale_log2) : 1.0F;
  step.partial_scale = exp2((r - finite) * scale_log2);
  step.sum = fmaf(l, step.partial_scale, step.rescales ? L * step.state_scale : L);
  return step;
}

}  // namespace ringattn
