// SPDX-License-Identifier: Apache-2.0
// Inputs of an SSM op over several sequences, and the results of any kernel of the table in any arrangement.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/common/registry.hpp"
#include "kernels/rope/rope.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn::testing {

using SsmRow = KernelRow<SsmSpec>;

// Sequences lie packed one after the other in dense arrays.
struct SsmData {
  SsmSpec spec;
  std::vector<std::int64_t> lengths;
  std::vector<std::byte> x, dt, b, c, z;  // dt: or log-decays (dt_rows())
  std::vector<float> a, d, dt_bias;
  std::vector<std::vector<float>> initial;   // [sequences] of [heads, head_dim, state_dim], or empty: zero
  std::optional<RopeSpec> rope = {};         // the kernel rotates b and c as it loads them
  std::vector<std::int64_t> positions = {};  // [rows], with rope

  std::int64_t rows() const;
  std::int64_t row_of(std::size_t sequence) const;  // its first
  std::size_t state_floats() const;                 // of all heads of a sequence
  // Sets element (row, head, dim) of one of the arrays above whose heads have `dims` elements.
  void set(std::vector<std::byte>& array, int heads, int dims, std::int64_t row, int head, int dim, float value) const;
  void set_x(std::int64_t row, int head, float value) { set(x, spec.heads, spec.head_dim, row, head, 0, value); }
  // Or all log-decays of the token and head.
  void set_dt(std::int64_t row, int head, float value);
  std::size_t dt_row_bytes() const;  // of a token
  // The tensors as a task in host memory, without runs and y.
  SsmTask task() const;
};

// Normal x, B, C and z; decays of a token between about 0.5 and 1.
SsmData random_ssm(const SsmSpec& spec, const std::vector<std::int64_t>& lengths, std::uint64_t seed);

// The same with decays so close to 1 that states outlive super-segments; otherwise errors in the carried states would
// not be seen.
SsmData with_slow_decays(SsmData inputs);

// The same with b and c already rotated.
SsmData rotated(SsmData inputs);

// Arrangements that must not change a bit.
struct SsmArrangement {
  int threads = 1;
  bool cut = false;        // a run for each super-segment
  int heads_at_once = 0;   // 0: all
  bool strided = false;    // a token's rows are apart, and the sequences lie in reverse order
  bool unaligned = false;  // no row of a 16-bit type but every eighth begins at a multiple of 16 bytes
};

struct SsmResult {
  std::vector<std::byte> y;   // [rows, heads, head_dim]
  std::vector<float> finals;  // [sequences, heads, head_dim, state_dim]

  bool same_bits(const SsmResult& other) const;
};

// Returns where the bits of a result first differ from the expected ones, or an empty string.
std::string first_difference(const SsmData& inputs, const SsmResult& result, const SsmResult& expected);

SsmResult run_ssm(const SsmRow& row, const SsmData& inputs, const SsmArrangement& arrangement = {});

// The same sequences token by token, all of one length: update() of every token, from the initial states or zero. With
// `slots`, one a sequence (SsmUpdate), the finals are those of all slots up to the last one; slots that are not written
// are NaN. `unaligned` as in SsmArrangement.
SsmResult update_with(const SsmRow& row, const SsmData& inputs, int threads = 1,
                      const std::vector<std::int32_t>& slots = {}, bool unaligned = false);

// The allowed errors of a kernel, as shares of the sum of the absolute values of all terms. For rows of y, their own
// rounding is allowed in addition.
struct SsmTolerance {
  double rows;
  double states;  // final ones
};
// Compares with the oracle. Returns where an error is too large, or an empty string.
std::string check_ssm_accuracy(const SsmData& inputs, const SsmResult& result, const SsmTolerance& tolerance);

// Errors of fp32: sums of logarithms below 512 have steps of 2^−15, and a weight that has not vanished is a difference
// of two such sums over a few tens of tokens.
inline constexpr double kSsmTerm = 1e-4;
// The same where no factor has 16 bits and a chunk's sum of logarithms stays below 90 (bench/notes/ssm.md has the
// bound).
inline constexpr double kFp32SsmTerm = 0x1p-18;
// The same of rows of random numbers where factors are rounded to bf16 (rounds_factors()): the largest rounding, which
// a row of one term meets. Those of many terms average out. ops/ssm/ssm_accuracy.hpp has a bound for all numbers.
inline constexpr double kRoundedSsmTerm = 0x1p-8;

}  // namespace ringattn::testing
