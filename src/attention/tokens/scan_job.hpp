// SPDX-License-Identifier: Apache-2.0
// A job of scans (kernels/scan.hpp): what is computed, over which sequences. Plain data, the same on every rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/scan.hpp"

namespace ringattn {

struct ScanJob {
  ScanSpec spec;
  std::vector<std::int64_t> lengths;  // [sequences] tokens, at least 1 each
  bool initial_states = false;        // sequences start from given states, else from zero
  bool final_states = false;          // the states behind them are wanted

  std::int64_t tokens() const;  // of all sequences
};

// "scan, bf16, 80 heads of 64, state 128, 1 group; 2 sequences, 131072 tokens, initial states"
std::string describe(const ScanJob& job);

// Bytes of one sequence's state, all heads.
std::int64_t state_bytes(const ScanSpec& spec);

}  // namespace ringattn
