// SPDX-License-Identifier: Apache-2.0
// Loads FP8 rows of latents (kernels/quant/latent_rows.hpp) from an input into memory, without dequantizing them.
#pragma once

#include <cstdint>
#include <span>

#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "ops/attention_jobs/job_input.hpp"

namespace ringattn {

// Fills `rows`, [total_tokens(runs), 1, half of a row's bytes] of 16-bit elements in host memory, with the rows of
// these packed keys. Returns the number of NaN and infinite values after dequantization. Throws the errors of
// JobInput::read_fp8_latents().
std::int64_t load_fp8_latents(const JobInput& input, std::span<const PackedRun> runs, const MutableTensorView& rows,
                              int threads);

}  // namespace ringattn
