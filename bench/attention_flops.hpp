// SPDX-License-Identifier: Apache-2.0
// FLOPs of attention over one whole sequence, for programs that measure kernels without a job.
#pragma once

#include <cstdint>

#include "attention/tokens/cost.hpp"
#include "kernels/attention/visibility.hpp"

namespace ringattn {

inline double attention_flops(const AttentionSpec& spec, std::int64_t tokens) {
  double pairs = 0.0;
  const Visibility visibility(spec.mask, tokens);
  for (std::int64_t position = 0; position < tokens; ++position) {
    const KeyRange seen = visibility.keys(position);
    pairs += static_cast<double>(seen.end - seen.begin);
  }
  return pairs * pair_flops(spec);
}

}  // namespace ringattn
