// SPDX-License-Identifier: Apache-2.0
// How the keys and values, or the latents, of a seed are stored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "attention/tokens/mla_job.hpp"
#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "kernels/quant/row_format.hpp"

namespace ringattn {

// `name`: a method of compression_methods(), in its usual format, or a format string; the rows' own dtype or an empty
// name: uncompressed. Throws kUsage for other names.
CacheFormat synthetic_format(const std::string& name, const AttentionSpec& spec);

// True if latents are stored as FP8 rows (kernels/quant/latent_rows.hpp). `name`: "fp8", or as above. Throws kUsage for
// other names, and for latents that FP8 rows don't support.
bool is_fp8_latent_format(const std::string& name, const MlaSpec& spec);

// Generates the FP8 rows of these tokens, consecutively, from the latents and rotary keys of fill_synthetic().
void make_fp8_latents(std::uint64_t seed, const MlaSpec& spec, std::span<const PackedRun> tokens,
                      std::span<std::byte> rows, int threads);
// The latents that these rows hold after dequantization: `latent` is [tokens, 1, latent_dim], bf16.
void make_stored_latents(std::uint64_t seed, const MlaSpec& spec, std::span<const PackedRun> tokens,
                         const MutableTensorView& latent, int threads);

}  // namespace ringattn
