// SPDX-License-Identifier: Apache-2.0
// Fills a rank's rows with synthetic input (kernels/synthetic.hpp), so any rank makes its own shard.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/packed_run.hpp"
#include "base/tensor.hpp"
#include "kernels/synthetic.hpp"

namespace ringattn {

// `rows`, [total_tokens(runs), heads, dim], get the elements of the runs' packed tokens, rounded to nearest even.
// `threads` of 0 is as many as OpenMP chooses; the values don't depend on it.
void fill_synthetic(std::uint64_t seed, SyntheticTensor tensor, std::span<const PackedRun> runs,
                    const MutableTensorView& rows, int threads = 0);

// A sink logit for each query head.
std::vector<float> synthetic_sinks(std::uint64_t seed, std::int64_t heads);

}  // namespace ringattn
