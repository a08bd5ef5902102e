// SPDX-License-Identifier: Apache-2.0
// What ranks must have in common before their bits can be equal.
#pragma once

#include <string>
#include <vector>

#include "comm/meeting.hpp"

namespace ringattn {

// One thing that all ranks must agree on, e.g. {"SIMD target", "AVX2"}.
struct Identity {
  std::string what;
  std::string value;
};

// Collective. Throws kUnsupported (as an AgreedError), naming the first thing and rank that differ from rank 0.
void handshake(const Meeting& meeting, const std::vector<Identity>& mine);

}  // namespace ringattn
