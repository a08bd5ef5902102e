// SPDX-License-Identifier: Apache-2.0
// Inputs of a scan over several sequences, and what any row of the table makes of them under any arrangement.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/registry.hpp"
#include "kernels/scan.hpp"

namespace ringattn::testing {

using ScanRow = KernelRow<ScanSpec>;

// Sequences lie packed one after the other in dense arrays.
struct ScanData {
  ScanSpec spec;
  std::vector<std::int64_t> lengths;
  std::vector<std::byte> x, dt, b, c, z;
  std::vector<float> a, d, dt_bias;
  std::vector<std::vector<float>> initial;  // [sequences] of [heads, head_dim, state_dim], or empty: zero

  std::int64_t rows() const;
  std::int64_t row_of(std::size_t sequence) const;  // its first
  std::size_t state_floats() const;                 // of all heads of a sequence
  // Sets element (row, head, dim) of one of the arrays above whose heads have `dims` elements.
  void set(std::vector<std::byte>& array, int heads, int dims, std::int64_t row, int head, int dim, float value) const;
  void set_x(std::int64_t row, int head, float value) { set(x, spec.heads, spec.head_dim, row, head, 0, value); }
  void set_dt(std::int64_t row, int head, float value) { set(dt, spec.heads, 1, row, head, 0, value); }
  // The tensors as a task in host memory, without runs and y.
  ScanTask task() const;
};

// Normal x, B, C and z; decays of a token between about 0.5 and 1.
ScanData random_scan(const ScanSpec& spec, const std::vector<std::int64_t>& lengths, std::uint64_t seed);

// The same with decays so near 1 that states outlive super-segments, else what is carried from one to the next would
// not be seen.
ScanData with_slow_decays(ScanData inputs);

// What may not move a bit.
struct ScanArrangement {
  int threads = 1;
  bool cut = false;        // a run for each super-segment
  int heads_at_once = 0;   // 0: all
  bool strided = false;    // a token's rows are apart, and the sequences lie in reverse order
  bool unaligned = false;  // no row of a 16-bit type but every eighth begins at a multiple of 16 bytes
};

struct ScanResult {
  std::vector<std::byte> y;   // [rows, heads, head_dim]
  std::vector<float> finals;  // [sequences, heads, head_dim, state_dim]

  bool same_bits(const ScanResult& other) const;
};

// Says where the bits of a result first differ from those expected, or nothing.
std::string first_difference(const ScanData& inputs, const ScanResult& result, const ScanResult& expected);

ScanResult scan_with(const ScanRow& row, const ScanData& inputs, const ScanArrangement& arrangement = {});

// The same sequences token by token, all of one length: update() of every token, from the initial states or zero. With
// `slots`, one a sequence (ScanUpdate), the finals are those of all slots up to the last one; what nobody writes is
// NaN. `unaligned` as in ScanArrangement.
ScanResult update_with(const ScanRow& row, const ScanData& inputs, int threads = 1,
                       const std::vector<std::int32_t>& slots = {}, bool unaligned = false);

// What a kernel may lose, as parts of the sum of the absolute values of all terms; of rows of y besides their own
// rounding.
struct ScanTolerance {
  double rows;
  double states;  // final ones
};
// Compares with the oracle; says where it is too far off, or nothing.
std::string check_scan_accuracy(const ScanData& inputs, const ScanResult& result, const ScanTolerance& tolerance);

// What fp32 costs: sums of logarithms below 512 have steps of 2^−15, and a weight that has not vanished is a difference
// of two such sums over a few tens of tokens.
inline constexpr double kScanTerm = 1e-4;
// The same where no factor has 16 bits and a chunk's sum of logarithms stays below 90 (bench/notes/ssm.md has the
// bound).
inline constexpr double kFp32ScanTerm = 0x1p-18;
// The same of rows of random numbers where factors are rounded to bf16 (rounds_factors()): more than what was met.
// attention/check/scan_accuracy.hpp has a bound for all numbers.
inline constexpr double kRoundedScanTerm = 0x1p-9;

}  // namespace ringattn::testing
