// SPDX-License-Identifier: Apache-2.0
// The promised accuracy of a scan, checked against fp64 on sampled rows: the state is folded token by token over all
// tokens up to a sampled one, in fp64, by the definition.
//
//   |y − y64| ≤ 2^−p · |y64| + r · m,   m = Σ |terms of y64|
//
// p: the bits of the dtype's significand, 8 (bf16), 11 (fp16), 24 (fp32): one rounding of y. m:
// what y64 is if no term cancels another, by the same recursion over absolute values. r: what a kernel may lose of a
// term. In fp32 that are decays, exponentials of sums whose steps are 2^−15 where they are large. In bf16 a kernel may
// round the factors of a product to bf16 once (sm90_scan does); one rounding takes up to 2^−8 of a term, but those of
// many terms are independent. The tests of kernels keep to the same. Behind a convolution x, B and C are what it makes
// of them in fp64, unrounded; what kernels lose there, one rounding and 1e-6 of the sum of its absolute terms, is
// followed through the recursion and allowed besides. Of a convolution alone that is all there is: 2^−p · |y64| + 1e-6
// · m.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/check/accuracy.hpp"
#include "attention/files/scan_input.hpp"
#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "comm/meeting.hpp"

namespace ringattn {

// r
constexpr double scan_term_tolerance(Dtype dtype) { return dtype == Dtype::kBf16 ? 0x1p-9 : 1e-4; }

// Plain bytes: ranks tell each other.
struct ScanAccuracy {
  std::int64_t rows = 0;
  std::int64_t compared = 0;  // values of y, where both are finite
  double part = 0.0;          // the greatest error as a part of what is allowed there
  double error = 0.0;         // that error
  double allowed = 0.0;
  RowSample worst;
  std::int64_t misplaced = 0;  // values that are NaN or infinite where fp64 has others, or the other way round
  RowSample first_misplaced;

  bool passes() const { return misplaced == 0 && part <= 1.0; }
};

// About `count` rows of a few heads, the first and the last token among them, wherever they lie: all ranks' answer. A
// value whose row is NaN or infinite in fp64 may be any such value, and so may those in front of one in its chunk
// (kernels/scan.hpp). `runs` and y, [rows, heads, head_dim] in host memory, are this rank's; so many threads compute.
// Collective.
ScanAccuracy check_scan_result(const Meeting& meeting, const ScanInput& input, std::int64_t count,
                               std::span<const PackedRun> runs, const TensorView& y, int threads);

}  // namespace ringattn
