// SPDX-License-Identifier: Apache-2.0
// The promised accuracy of an SSM layer, checked against fp64 on sampled rows. The fp64 state is updated token by token
// over all tokens up to a sampled one, by the definition.
//
//   |y − y64| ≤ 2^−p · |y64| + r · m,   m = Σ |terms of y64|
//
// p: the bits of the dtype's significand, 8 (bf16), 11 (fp16), 24 (fp32): one rounding of y. For fp16 that error is at
// least 2^−25, half of the spacing of its subnormal numbers, below 2^−14. m: y64 if no term cancels another, by the
// same recursion over absolute values. r: the allowed fp32 error of a term, because decays are exponentials of sums
// whose spacing is 2^−15 where they are large. The tests of kernels use the same bound. After a convolution, x, B and C
// are its outputs in fp64, unrounded. The error of kernels there, one rounding and 1e-6 of the sum of absolute terms,
// is propagated through the recursion and allowed in addition. For a job of conv1d only the bound is 2^−p · |y64| +
// 1e-6 · m.
//
// A final state is compared if its rank has sampled rows of its sequence: |S − S64| ≤ 2^−24 · |S64| + r · m, plus the
// error of a preceding convolution.
//
// A kernel that rounds factors of rows (rounds_factors()) may have larger errors. The contribution of a token in the
// row's chunk is rounded once more (its intra-chunk score). That of an earlier token of the row's segment is rounded
// twice (the score, and x times it). Each element of the state before the chunk is rounded once. If all terms have the
// same sign, that is at most 3 · 2^−p of y. If they cancel, the roundings are independent errors, for which six
// standard deviations are allowed:
//
//   + 3 · 2^−p · |y64| + 6 · 2^−p / √3 · √(Σ chunk t_j² + 2 Σ segment t_j² + Σ_n (c_n s_n)²)
//
// t_j: the contribution of token j to the row; c_n s_n: that of element n of the state before the chunk. With
// SsmDecay::kDim the decayed elements of q and k are rounded instead. Then t_jn, the contribution of element n of k_j,
// replaces a token's term, and an element of q has one rounding for all tokens of a sub-chunk of 16, and one for the
// state:
//
//   Σ chunk (t_j² + Σ_n t_jn²) + Σ sub-chunks Σ_n (Σ_j t_jn)² + Σ segment Σ_n t_jn² + 2 Σ_n (c_n s_n)²
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "comm/collective.hpp"
#include "ops/attention_jobs/accuracy.hpp"
#include "ops/ssm/ssm_input.hpp"

namespace ringattn {

inline constexpr double kSsmTermTolerance = 1e-4;  // r

// Trivially copyable, because ranks exchange it.
struct StateAccuracy {
  std::int64_t compared = 0;  // elements that are finite here and in fp64
  double part = 0.0;          // as in SsmAccuracy
  double error = 0.0;
  double allowed = 0.0;
  std::int32_t sequence = 0;  // of that error
  std::int32_t head = 0;
  std::int64_t misplaced = 0;

  bool passes() const { return misplaced == 0 && part <= 1.0; }
};

struct SsmAccuracy {
  std::int64_t rows = 0;
  std::int64_t compared = 0;  // values of y that are finite here and in fp64
  double part = 0.0;          // the greatest error, as a fraction of the allowed error
  double error = 0.0;         // that error
  double allowed = 0.0;
  RowSample worst;
  std::int64_t misplaced = 0;  // values that are NaN or infinite here or in fp64, but not the same in both
  RowSample first_misplaced;
  StateAccuracy states;

  bool passes() const { return misplaced == 0 && part <= 1.0 && states.passes(); }
};

// A rank's results of an SSM op, in host memory.
struct SsmResultView {
  std::span<const PackedRun> runs;       // packed tokens
  TensorView y;                          // [rows of them, heads, head_dim]
  std::span<const PackedRun> sequences;  // the sequences whose final states are compared; may be empty
  TensorView states;                     // [sequences, heads, head_dim · state_dim] fp32
};

// Checks about `count` rows of a few heads, including the first and the last token, on whichever ranks they are. All
// ranks get the same result. A value whose row is NaN or infinite in fp64 may be any such value, and so may earlier
// values in its chunk (kernels/ssm/ssm.hpp). `result`: this rank's; its states aren't read for a job of conv1d only.
// `threads`: CPU threads. `rounded`: rounds_factors() of the kernel. Collective.
SsmAccuracy check_ssm_result(const Collective& collective, const SsmInput& input, std::int64_t count,
                             const SsmResultView& result, bool rounded, int threads);

}  // namespace ringattn
