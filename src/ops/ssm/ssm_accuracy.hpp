// SPDX-License-Identifier: Apache-2.0
// The promised accuracy of an SSM layer, checked against fp64 on sampled rows. The fp64 state is updated token by token
// over all tokens up to a sampled one, by the definition.
//
//   |y − y64| ≤ 2^−p · |y64| + r · m,   m = Σ |terms of y64|
//
// p: the bits of the dtype's significand, 8 (bf16), 11 (fp16), 24 (fp32): one rounding of y. That of fp16 is at least
// 2^−25, half of the spacing of its subnormal numbers, below 2^−14. m: what y64 is if no term cancels another, by the
// same recursion over absolute values. r: what fp32 may lose of a term, for decays are exponentials of sums whose steps
// are 2^−15 where they are large. The tests of kernels use the same bound. After a convolution, x, B and C are its
// outputs in fp64, unrounded. What kernels lose there, one rounding and 1e-6 of the sum of absolute terms, is followed
// through the recursion and allowed in addition. For only a convolution the bound is 2^−p · |y64| + 1e-6 · m.
//
// A final state is compared where its rank has sampled rows of its sequence: |S − S64| ≤ 2^−24 · |S64| + r · m, and
// what a preceding convolution may lose.
//
// A kernel that rounds factors of rows (rounds_factors()) may lose more. The contribution of a token in the row's chunk
// is rounded once more (its intra-chunk score). That of an earlier token of the row's segment is rounded twice (the
// score, and x times it). Each element of the state before the chunk is rounded once. Where all terms have one sign
// that is 3 · 2^−p of y at most. Where they cancel, the roundings are independent errors, of which six standard
// deviations are allowed:
//
//   + 3 · 2^−p · |y64| + 6 · 2^−p / √3 · √(Σ chunk t_j² + 2 Σ segment t_j² + Σ_n (c_n s_n)²)
//
// t_j: what token j adds to the row; c_n s_n: what element n of the state before the chunk adds. With SsmDecay::kDim
// the decayed elements of q and k are rounded instead. Then t_jn, what element n of k_j adds, takes the place of a
// token's term, and an element of q has one rounding for all tokens of a sub-chunk of 16, and one for the state:
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

// Plain bytes: ranks tell each other.
struct StateAccuracy {
  std::int64_t compared = 0;  // elements, where both are finite
  double part = 0.0;          // as of SsmAccuracy
  double error = 0.0;
  double allowed = 0.0;
  std::int32_t sequence = 0;  // with that error
  std::int32_t head = 0;
  std::int64_t misplaced = 0;

  bool passes() const { return misplaced == 0 && part <= 1.0; }
};

struct SsmAccuracy {
  std::int64_t rows = 0;
  std::int64_t compared = 0;  // values of y, where both are finite
  double part = 0.0;          // the greatest error as a part of what is allowed there
  double error = 0.0;         // that error
  double allowed = 0.0;
  RowSample worst;
  std::int64_t misplaced = 0;  // values that are NaN or infinite where fp64 has others, or the other way round
  RowSample first_misplaced;
  StateAccuracy states;

  bool passes() const { return misplaced == 0 && part <= 1.0 && states.passes(); }
};

// What a rank has of an SSM op's results, in host memory.
struct SsmResultView {
  std::span<const PackedRun> runs;       // packed tokens
  TensorView y;                          // [rows of them, heads, head_dim]
  std::span<const PackedRun> sequences;  // whose final states are compared; may be empty
  TensorView states;                     // [sequences, heads, head_dim · state_dim] fp32
};

// Checks about `count` rows of a few heads, the first and the last token among them, wherever they lie. All ranks get
// the same answer. A value whose row is NaN or infinite in fp64 may be any such value, and so may those before one in
// its chunk (kernels/ssm/ssm.hpp). `result` is this rank's; its states aren't read for only a convolution. `threads`
// threads compute. `rounded`: rounds_factors() of the kernel. Collective.
SsmAccuracy check_ssm_result(const Collective& collective, const SsmInput& input, std::int64_t count,
                             const SsmResultView& result, bool rounded, int threads);

}  // namespace ringattn
