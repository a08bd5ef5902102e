// SPDX-License-Identifier: Apache-2.0
// The ops that compute a job.
#pragma once

#include <cstddef>
#include <string_view>

namespace ringattn {

// Attention and decode give a row the same bits.
enum class Op {
  kAttention,        // queries in any number; ranks exchange K/V blocks
  kDecode,           // a few queries at the end of each sequence, whose keys lie in a cache
  kMla,              // attention over latents
  kSsd,              // Mamba-2: one decay per head
  kSelectiveScan,    // Mamba-1: a decay for each state of a channel
  kConv1d,           // the causal convolution before an SSM
  kLinearAttention,  // SSD with log-decays
};

// "attention", "decode", "mla", "ssd", "selective_scan", "conv1d", "linear_attention"
constexpr std::string_view op_name(Op op) {
  constexpr std::string_view kNames[] = {"attention", "decode",          "mla", "ssd", "selective_scan",
                                         "conv1d",    "linear_attention"};
  return kNames[static_cast<std::size_t>(op)];
}

}  // namespace ringattn
