// SPDX-License-Identifier: Apache-2.0
// The promised accuracy of an SSM, checked against fp64 on sampled rows. The state is computed token by token over all
// tokens up to a sampled one, in fp64, by the definition.
//
//   |y − y64| ≤ 2^−p · |y64| + r · m,   m = Σ |terms of y64|
//
// p: the bits of the dtype's significand, 8 (bf16), 11 (fp16), 24 (fp32): one rounding of y. For fp16 the first term is
// at least 2^−25, half of the spacing of its subnormal numbers, below 2^−14. m: the value of y64 if no terms cancel, by
// the same recursion over absolute values. r: the loss of a term in fp32, because decays are exponentials of sums whose
// spacing is 2^−15 where they are large. Tests of kernels use the same bound. After a convolution, x, B and C are its
// results in fp64, unrounded. The loss of kernels there, one rounding and 1e-6 of the sum of its absolute terms, is
// propagated through the recursion and added. For a convolution only, the bound is 2^−p · |y64| + 1e-6 · m.
//
// A final state is compared if its rank has sampled rows of its sequence: |S − S64| ≤ 2^−24 · |S64| + r · m, plus the
// loss of the convolution.
//
// A kernel that rounds factors of rows (rounds_factors()) may lose more. The term of a token of the row's chunk is
// rounded once more (its weight). The term of a token of the row's segment before the chunk is rounded twice (the
// weight, and x times it). Each element of the state before the chunk is rounded once. If all terms have one sign this
// is at most 3 · 2^−p of y. If they cancel, the roundings are independent errors, and six standard deviations are
// allowed:
//
//   + 3 · 2^−p · |y64| + 6 · 2^−p / √3 · √(Σ chunk t_j² + 2 Σ segment t_j² + Σ_n (c_n s_n)²)
//
// t_j: the term of token j; c_n s_n: the term of element n of the state before the chunk.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/check/accuracy.hpp"
#include "attention/files/ssm_input.hpp"
#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "comm/collective.hpp"

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

// A rank's results of an SSM, in host memory.
struct SsmResultView {
  std::span<const PackedRun> runs;       // packed tokens
  TensorView y;                          // [rows of them, heads, head_dim]
  std::span<const PackedRun> sequences;  // whose final states are compared; may be empty
  TensorView states;                     // [sequences, heads, head_dim · state_dim] fp32
};

// Checks about `count` rows of a few heads, always with the first and the last token; all ranks get the same result. A
// value whose row is NaN or infinite in fp64 may be any such value, and so may the values before it in its chunk
// (kernels/ssm.hpp). `result` is this rank's; for a convolution only its states aren't read. `threads` threads compute.
// `rounded`: rounds_factors() of the kernel. Collective.
SsmAccuracy check_ssm_result(const Collective& collective, const SsmInput& input, std::int64_t count,
                             const SsmResultView& result, bool rounded, int threads);

}  // namespace ringattn
