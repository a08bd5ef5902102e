// SPDX-License-Identifier: Apache-2.0
// Compares the configuration of all ranks. Results have the same bits only if these are equal.
#pragma once

#include <string>
#include <vector>

#include "comm/collective.hpp"

namespace ringattn {

// A named setting that must be equal on all ranks, e.g. {"SIMD target", "AVX2"}.
struct RankConfigEntry {
  std::string what;
  std::string value;
};

// Collective. Throws kUnsupported (as an AgreedError) for the first setting and rank that differ from rank 0.
void handshake(const Collective& collective, const std::vector<RankConfigEntry>& mine);

}  // namespace ringattn
