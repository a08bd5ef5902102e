// SPDX-License-Identifier: Apache-2.0
// What ranks must have in common before their bits can be equal.
#pragma once

#include <string>
#include <vector>

#include "comm/collective.hpp"

namespace ringattn {

// One thing that all ranks must agree on, e.g. {"SIMD target", "AVX2"}.
struct RankConfigEntry {
  std::string what;
  std::string value;
};

// Collective. Throws kUnsupported (as an AgreedError), naming the first thing and rank that differ from rank 0.
void handshake(const Collective& collective, const std::vector<RankConfigEntry>& mine);

}  // namespace ringattn
