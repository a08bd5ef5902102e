// SPDX-License-Identifier: Apache-2.0
// Inputs of an SSD backward pass over several sequences, and the results of any kernel of the table in any arrangement.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/common/registry.hpp"
#include "kernels/ssd_backward/ssd_backward.hpp"
#include "kernels/ssd_backward/ssd_backward_oracle.hpp"
#include "tests/support/ssm_data.hpp"

namespace ringattn::testing {

using SsdBackwardRow = KernelRow<SsdBackwardSpec>;

struct SsdBackwardData {
  SsmData ssm;
  Dtype gradients = Dtype::kF32;
  std::vector<std::byte> dy;                          // [rows, heads, head_dim]
  std::vector<std::vector<float>> final_gradients{};  // [sequences] of [heads, head_dim, state_dim], or empty: zero

  SsdBackwardSpec spec() const { return {ssm.spec, gradients}; }
  // The tensors as a task in host memory, without runs and gradients.
  SsdBackwardTask task() const;
};

// random_ssm() and a normal dy; with `states` also normal initial states and gradients of final states.
SsdBackwardData random_ssd_backward(const SsdBackwardSpec& spec, const std::vector<std::int64_t>& lengths, bool states,
                                    std::uint64_t seed);

// One sequence of them.
SsdBackwardData sequence_of(const SsdBackwardData& inputs, std::size_t sequence);

// Packed as the inputs, in the gradients' dtype.
struct SsdBackwardResult {
  std::vector<std::byte> dx, ddt, db, dc, dz;
  std::vector<SsdTerms> terms;           // [segments of all sequences, heads]
  std::vector<float> initial_gradients;  // [sequences, heads, head_dim, state_dim]

  bool same_bits(const SsdBackwardResult& other) const;
};

// The part of a sequence in a result.
SsdBackwardResult sequence_of(const SsdBackwardData& inputs, const SsdBackwardResult& result, std::size_t sequence);

// `arrangement.heads_at_once` counts sets of heads.
SsdBackwardResult run_ssd_backward(const SsdBackwardRow& row, const SsdBackwardData& inputs,
                                   const SsmArrangement& arrangement = {});

// Compares with the oracle: each element (ssd_gradient_term()), and, if the kernel rounds factors to 16 bits, rows of
// random numbers as a whole (ssd_gradient_rms()). Returns where an error is too large, or an empty string.
std::string check_ssd_gradients(const SsdBackwardData& inputs, const SsdBackwardResult& result, bool rounds_factors);

}  // namespace ringattn::testing
