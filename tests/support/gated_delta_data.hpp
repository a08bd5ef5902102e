// SPDX-License-Identifier: Apache-2.0
// Inputs of a gated delta rule over several sequences, and the results of any kernel of the table in any arrangement.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/gated_delta/gated_delta.hpp"

namespace ringattn::testing {

using GatedDeltaRow = KernelRow<GatedDeltaSpec>;

// Sequences lie packed one after the other in dense arrays.
struct GatedDeltaData {
  GatedDeltaSpec spec;
  std::vector<std::int64_t> lengths;
  std::vector<std::byte> q, k, v;
  std::vector<float> log_decay, beta;
  std::vector<std::vector<float>> initial;  // [sequences] of [value_heads, key_dim, value_dim], or empty: zero

  std::int64_t rows() const;
  std::int64_t row_of(std::size_t sequence) const;  // its first
  std::size_t state_size() const { return static_cast<std::size_t>(state_floats(spec)); }
  // The tensors as a task in host memory, without runs and o.
  GatedDeltaTask task() const;
  // Tokens [begin, end) of one sequence as a sequence of their own, without an initial state.
  GatedDeltaData slice(std::size_t sequence, std::int64_t begin, std::int64_t end) const;
};

// Normal q and v, keys of length about 1, decays of a token between 0.8 and 1, and beta between 0 and 1.
GatedDeltaData random_gated_delta(const GatedDeltaSpec& spec, const std::vector<std::int64_t>& lengths,
                                  std::uint64_t seed);
// The same with normal initial states.
GatedDeltaData with_initial_states(GatedDeltaData data, std::uint64_t seed);

// Arrangements that must not change a bit.
struct GatedDeltaArrangement {
  int threads = 1;
  bool cut = false;        // a run for each segment
  int heads_at_once = 0;   // 0: all
  bool strided = false;    // a token's rows are apart, and the sequences lie in reverse order
  bool unaligned = false;  // no row of a 16-bit type but every eighth begins at a multiple of 16 bytes
  bool finals = true;      // final states are written
};

struct GatedDeltaResult {
  std::vector<std::byte> o;   // [rows, value_heads, value_dim]
  std::vector<float> finals;  // [sequences, value_heads, key_dim, value_dim]
};

// Returns where the bits of a result first differ from the expected ones, or an empty string.
std::string first_difference(const GatedDeltaData& data, const GatedDeltaResult& result,
                             const GatedDeltaResult& expected);

GatedDeltaResult run_gated_delta(const GatedDeltaRow& row, const GatedDeltaData& data,
                                 const GatedDeltaArrangement& arrangement = {});

// The same sequences token by token, by update() of every token. All have the same length. With `slots`, one per
// sequence, the final states are those of all slots up to the last one; slots that are not written are NaN.
GatedDeltaResult update_gated_delta(const GatedDeltaRow& row, const GatedDeltaData& data, int threads = 1,
                                    const std::vector<std::int32_t>& slots = {});

// Compares with the oracle and its bound. Returns where the error is too large, or an empty string. `rounded`: whether
// the kernel rounds factors.
std::string check_gated_delta_accuracy(const GatedDeltaData& data, const GatedDeltaResult& result, bool rounded);

}  // namespace ringattn::testing
