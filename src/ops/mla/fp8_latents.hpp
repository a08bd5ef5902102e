// SPDX-License-Identifier: Apache-2.0
// Latents in FP8 rows (kernels/quant/latent_rows.hpp) on their way from an input into memory, as they are.
#pragma once

#include <cstdint>
#include <span>

#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "ops/attention_jobs/job_input.hpp"

namespace ringattn {

// Fills `rows`, [total_tokens(runs), 1, half of a row's bytes] of 16-bit elements in host memory, with the rows of
// these packed keys. Returns how many of the numbers that they are unpacked to are NaN or infinite. Throws what
// JobInput::read_fp8_latents() throws.
std::int64_t load_fp8_latents(const JobInput& input, std::span<const PackedRun> runs, const MutableTensorView& rows,
                              int threads);

}  // namespace ringattn
