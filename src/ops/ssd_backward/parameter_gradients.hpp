// SPDX-License-Identifier: Apache-2.0
// The gradients of SSD's parameters: sums of the segments' terms (SsdTerms), in an order that does not depend on ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/tokens/layout.hpp"
#include "comm/collective.hpp"
#include "kernels/ssd_backward/ssd_backward.hpp"

namespace ringattn {

// [heads], fp32, equal on all ranks; empty for a parameter that the spec lacks.
struct SsdParameterGradients {
  std::vector<float> da;
  std::vector<float> dd;
  std::vector<float> ddt_bias;
};

// Collective. `terms`: [segments of this rank's runs, heads]. Sums them in fp32: over the segments of a sequence,
// ascending, then over the sequences in order. Every rank gets the sums.
SsdParameterGradients sum_ssd_terms(const Collective& collective, const SsmSpec& spec, std::span<const TokenRun> runs,
                                    std::span<const SsdTerms> terms);

}  // namespace ringattn
